"""Where training has only begun, and steps are small beside the weights, a step that looks too large is not."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pydantic import Field

from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import Part


@dataclass(frozen=True)
class Beginning:
    """How training has begun.

    Attributes:
        first: the held-out loss of the first weights; 0 before it is known.
        lost: whether the run went back, or began anew; then nothing is taken to be small any more.
    """

    first: float = 0.0
    lost: bool = False


class OfSmallSteps(Part):
    """Knows how far a learning rate can be lowered before its steps are small.

    In the first windows of a model that was not trained before, a single direction (in language models, how often each
    token comes) makes up most of the gradient, and few steps use it up, at any rate. Lines along these steps have
    their minimum early, the sooner the larger the model, and call for less at rates far below the best one.

    It holds while the schedule rises, which is where evidence tells `Estimate.step_size`, once the held-out loss has
    fallen by the share `fallen` since the first weights (`Estimate.opening`): so not in fine-tuning, where small steps
    do harm.

    Args:
        small: `step_size` up to which steps are small. At the best rates of 13 tasks by AdamW, of models that were not
            trained before, it is 0.15 to 8, and below 0.46 in one of them (`benchmarks/step_sizes.py`).
        fallen: share of the first weights' held-out loss.
    """

    small: float = Field(default=1.0, ge=0, le=100)
    fallen: float = Field(default=0.25, ge=0, lt=1)

    def start(self) -> Beginning:
        return Beginning()

    def observe(self, state: Beginning, estimate: Estimate, context: Context) -> Beginning:
        return state if estimate.opening is None else replace(state, first=estimate.opening)

    def retreat(self, state: Beginning, context: Context) -> Beginning:
        return replace(state, lost=True)

    def restart(self, state: Beginning, context: Context) -> Beginning:
        return self.retreat(state, context)

    def room(self, state: Beginning, estimate: Estimate, context: Context) -> float | None:
        """The move to where steps are small, or to the schedule as given if that is lower; None says nothing."""
        size, level = estimate.step_size, estimate.level
        if state.lost or not size or level is None or self.small == 0.0:
            return None
        begun = state.first > 0.0 and level <= (1.0 - self.fallen) * state.first
        return min(-context.shift, math.log(self.small / size)) if begun else None
