"""A peak that is too high or too low is seen before the schedule reaches it."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hdet.controllers.beginning import Beginning, OfRaises
from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.newton import newton_move
from hdet.controllers.part import Rule
from hdet.spec import register


@register
class LookAhead(OfRaises, Rule):
    """Make the Newton move of the last weights, up or down, if `|t| > significance`; else hold.

    It judges estimates taken ahead of the base (`Estimate.offset`), early in a warm-up. Where an untrained model's
    steps are tiny (`tiny`), a raise goes at once to where the best ones may lie. A pretrained model's may go up to
    `furthest`, the further the more significant it is, and in the first window to short of
    `Estimate.bottom`.

    Args:
        significance: |t| at the last weights from which they are believed.
        early_limit: largest move, in coordinates, but for those raises.
        ceiling: largest shift that it raises to. The default, a factor of e^5, hardly limits, since a guard
            (`hdet.Rewind`) undoes what goes wrong; without one 0 is cautious: never above the schedule as given.

    >>> ahead = Estimate(slope=0.3, curvature=1.0, stderr=0.1, offset=0.7)
    >>> LookAhead().propose(LookAhead().start(), ahead, Context())
    -0.3
    """

    looks_ahead: ClassVar[bool] = True

    early_limit: float = Field(default=0.6, gt=0, le=10)

    def wants_curvature(self, slope: Estimate, *, averaged: bool = False) -> bool:
        return not averaged and slope.offset > 0 and abs(slope.t_of_eight) > self.significance

    def propose(self, state: Beginning, estimate: Estimate, context: Context) -> float:
        if abs(estimate.t_of_eight) <= self.significance:
            return 0.0
        limit = self.limited(self.early_limit, state, estimate)
        move = self.at_least(newton_move(estimate, limit), state, estimate, context)
        return min(move, max(0.0, self.ceiling - context.shift))
