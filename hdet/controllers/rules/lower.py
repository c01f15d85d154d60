"""Averaged weights are believed where they call for less."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.newton import newton_move
from hdet.controllers.part import Rule
from hdet.spec import register


@register
class Lower(Rule):
    """Make the Newton move of the averaged weights, if their `t > lower_significance`.

    Averaged weights flatter large steps, so they are believed where they call for small ones.

    Args:
        lower_significance: t at averaged weights from which they are believed. It is higher than the other rules'
            significance: a schedule that decays lowers the rate in any case, and one lowered by mistake costs more.
        limit: largest move, in coordinates.

    >>> averaged = Estimate(slope=0.2, curvature=1.0, stderr=0.05)
    >>> Lower().propose(Lower().start(), Estimate(slope=0.0, stderr=0.1, averaged=averaged), Context())
    -0.2
    """

    needs_averaged: ClassVar[bool] = True

    lower_significance: float = Field(default=3.0, gt=0, le=100)
    limit: float = Field(default=0.5, gt=0, le=10)

    def wants_curvature(self, slope: Estimate, *, averaged: bool = False) -> bool:
        return averaged and slope.t > self.lower_significance

    def propose(self, state: Any, estimate: Estimate, context: Context) -> float | None:
        averaged = estimate.averaged
        if averaged is None or not averaged.testable or averaged.t <= self.lower_significance:
            return None
        return min(0.0, newton_move(averaged, self.limit))
