"""Weight decay leaves pretrained weights most of what they were before."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field

from hdet.controllers.controller import Context
from hdet.controllers.estimate import MOST_EXCESS, Estimate
from hdet.controllers.part import Part, Rule
from hdet.spec import register

_LEAST_KEPT = 1e-6
# Moves that are smaller come of rounding, and would keep other rules from speaking.
_NEAR = 0.05


@dataclass(frozen=True)
class SpareState:
    """Whether the run's first weights had been trained, and whether only new ones beside them are trained now."""

    pretrained: bool = False
    adapts: bool = False


class OfPretrained(Part):
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

    def start(self) -> SpareState:
        return SpareState()

    def begin(self, state: Any, estimate: Estimate) -> SpareState:
        own = estimate.own_excess
        return SpareState(bool(estimate.pretrained), own is not None and own <= MOST_EXCESS)

    def retreat(self, state: Any, context: Context) -> Any:
        return state

    def restart(self, state: Any, context: Context) -> Any:
        return state

    def room(self, state: SpareState, estimate: Estimate, context: Context) -> float | None:
        """How far the decay may go up, or has to go down, in coordinates; None says nothing."""
        if not state.pretrained or not estimate.stretch or context.total_steps is None:
            return None
        if context.total_steps > self.short:
            return None
        taken = -math.log(max(1.0 - estimate.stretch, _LEAST_KEPT)) * context.total_steps / context.length
        return math.log((self.most_of_adapters if state.adapts else self.most_taken) / taken)


@register
class Spare(OfPretrained, Rule):
    """In fine-tuning, lower a decay that would take too much of the weights if the run went on as in the window.

    What was learnt before fine-tuning lies in the weights, and decay takes it away slowly: no window sees that. What
    adapters learn is new, and has to outlast the run.

    >>> rule, window = Spare(), Context(length=10, total_steps=300)
    >>> round(rule.propose(SpareState(pretrained=True), Estimate(slope=0.0, stretch=0.03), window), 3)
    -1.519
    """

    overrules: ClassVar[bool] = True

    def wants_curvature(self, slope: Estimate, *, averaged: bool = False) -> bool:
        return False

    def propose(self, state: Any, estimate: Estimate, context: Context) -> float | None:
        room = self.room(state, estimate, context)
        return room if room is not None and room < -_NEAR else None
