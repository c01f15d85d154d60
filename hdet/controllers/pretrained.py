"""How much of pretrained weights a decay takes in a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from hdet.controllers.beginning import KnowsPretrained
from hdet.controllers.controller import Context
from hdet.controllers.estimate import MOST_EXCESS, Estimate

_LEAST_KEPT = 1e-6


@dataclass(frozen=True)
class FineTuning:
    """Whether the run's first weights had been trained, and whether only new ones beside them are trained now."""

    pretrained: bool = False
    adapts: bool = False


class OfPretrained(KnowsPretrained):
    """Knows how much of pretrained weights a decay takes, if the run goes on as in the window.

    It speaks in short runs alone: in a long one what decay takes is learnt anew.

    Args:
        most_taken: the sum of learning rate * decay over as many steps as the run has, up to which a decay stays.
        most_of_adapters: the same where all weights that train are new (`Estimate.own_excess`).
        short: steps of the longest run that it speaks in.
    """

    most_taken: float = Field(default=0.2, gt=0)
    most_of_adapters: float = Field(default=1.0, gt=0)
    short: int = Field(default=1000, ge=0)

    def start(self) -> FineTuning:
        return FineTuning()

    def begin(self, state: Any, estimate: Estimate) -> Any:
        own = estimate.own_excess
        return replace(super().begin(state, estimate), adapts=own is not None and own <= MOST_EXCESS)

    def retreat(self, state: Any, context: Context) -> Any:
        return state

    def room(self, state: FineTuning, estimate: Estimate, context: Context) -> float | None:
        """How far the decay may go up, or has to go down, in coordinates; None says nothing."""
        if not state.pretrained or not estimate.stretch or context.total_steps is None:
            return None
        if context.total_steps > self.short:
            return None
        taken = -math.log1p(-min(estimate.stretch, 1.0 - _LEAST_KEPT)) * context.total_steps / context.length
        return math.log((self.most_of_adapters if state.adapts else self.most_taken) / taken)
