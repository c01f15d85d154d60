"""Averaged weights are believed where they call for less."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from hdet.controllers.beginning import KnowsPretrained
from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.newton import newton_move
from hdet.controllers.part import Rule
from hdet.spec import register


@dataclass(frozen=True)
class LowerState:
    """Whether the run's first weights had been trained."""

    pretrained: bool = False


@register
class Lower(KnowsPretrained, Rule):
    """Make the Newton move of the averaged weights, if their `t > lower_significance`.

    Averaged weights flatter large steps, so they are believed where they call for small ones.

    Args:
        lower_significance: t at averaged weights from which they are believed. It is higher than the other rules'
            significance: a schedule that decays lowers the rate in any case, and one lowered by mistake costs more.
        pretrained_significance: the same of a pretrained model (`Estimate.pretrained`). Fine-tuning is short, and its
            windows too; where the rate is many times too high t is beyond it all the same.
        limit: largest move, in coordinates.

    >>> averaged = Estimate(slope=0.2, curvature=1.0, stderr=0.05)
    >>> Lower().propose(Lower().start(), Estimate(slope=0.0, stderr=0.1, averaged=averaged), Context())
    -0.2
    """

    needs_averaged: ClassVar[bool] = True

    lower_significance: float = Field(default=3.0, gt=0, le=100)
    pretrained_significance: float = Field(default=5.0, gt=0, le=100)
    limit: float = Field(default=0.5, gt=0, le=10)

    def wants_curvature(self, slope: Estimate, *, averaged: bool = False) -> bool:
        return averaged and slope.t_of_eight > min(self.lower_significance, self.pretrained_significance)

    def start(self) -> LowerState:
        return LowerState()

    def propose(self, state: LowerState, estimate: Estimate, context: Context) -> float | None:
        averaged = estimate.averaged
        believed = self.pretrained_significance if state.pretrained else self.lower_significance
        if averaged is None or not averaged.testable or averaged.t_of_eight <= believed:
            return None
        return newton_move(averaged, self.limit)
