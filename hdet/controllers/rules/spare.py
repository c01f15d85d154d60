"""Weight decay leaves pretrained weights most of what they were before."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field

from hdet.controllers.beginning import KnowsPretrained
from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import Rule
from hdet.spec import register


@dataclass(frozen=True)
class SpareState:
    """Whether the run's first weights had been trained."""

    pretrained: bool = False


@register
class Spare(KnowsPretrained, Rule):
    """In fine-tuning, lower a decay that would take too much of the weights if the run went on as in the window.

    What was learnt before fine-tuning lies in the weights, and decay takes it away slowly: no window sees that.

    Args:
        most_taken: the sum of learning rate * decay over as many steps as the run has, up to which a decay stays.

    >>> rule, window = Spare(), Context(length=10, total_steps=300)
    >>> round(rule.propose(SpareState(pretrained=True), Estimate(slope=0.0, stretch=0.03), window), 3)
    -1.519
    """

    overrules: ClassVar[bool] = True

    most_taken: float = Field(default=0.2, gt=0)

    def start(self) -> SpareState:
        return SpareState()

    def wants_curvature(self, slope: Estimate, *, averaged: bool = False) -> bool:
        return False

    def propose(self, state: Any, estimate: Estimate, context: Context) -> float | None:
        if not state.pretrained or not estimate.stretch or context.total_steps is None:
            return None
        kept = 1.0 - min(estimate.stretch, 1.0)
        taken = -math.log(kept) * context.total_steps / context.length if kept > 0.0 else math.inf
        return math.log(self.most_taken / taken) if self.most_taken < taken < math.inf else None
