"""Where training has only begun, and steps are small beside the weights, a step that looks too large is not."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import Part


@dataclass(frozen=True)
class Beginning:
    """How training has begun.

    Attributes:
        untrained: whether the run began with untrained weights, and has neither gone back nor begun anew since.
    """

    untrained: bool = False


class OfUntrained(Part):
    """Knows whether the run began with untrained weights."""

    def start(self) -> Beginning:
        return Beginning()

    def observe(self, state: Any, estimate: Estimate, context: Context) -> Any:
        return state if estimate.untrained is None else replace(state, untrained=estimate.untrained)


class OfSmallSteps(OfUntrained):
    """Knows how far a learning rate can be lowered before its steps are small.

    In the first windows of an untrained model, a single direction (in language models, how often each token comes)
    makes up most of the gradient, and few steps use it up, at any rate. Lines along these steps have their minimum
    early, the sooner the larger the model, and call for less at rates far below the best one.

    It holds while the schedule rises, which is where evidence tells `Estimate.step_size`, and if the first weights were
    untrained (`Estimate.untrained`): so not in fine-tuning, where small steps do harm.

    Args:
        small: `step_size` up to which steps are small. At the best rates of 13 tasks by AdamW, of untrained models, it
            is 0.13 to 3.7, and below 0.46 in three of them (`benchmarks/step_sizes.py`).
    """

    small: float = Field(default=1.0, ge=0, le=100)

    def room(self, state: Beginning, estimate: Estimate, context: Context) -> float | None:
        """The move to where steps are small, or to the schedule as given if that is lower; None says nothing."""
        size = estimate.step_size
        if not state.untrained or not size or self.small == 0.0:
            return None
        return min(-context.shift, math.log(self.small / size))
