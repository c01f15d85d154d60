"""The last weights are believed where they call for more."""

from __future__ import annotations

from pydantic import Field

from hdet.controllers.beginning import Beginning, OfRaises
from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.newton import newton_move
from hdet.controllers.part import Rule
from hdet.spec import register


@register
class Raise(OfRaises, Rule):
    """Make the Newton move of the last weights, if their `t < -significance`.

    The last weights flatter small steps, so they are believed where they call for large ones. While the schedule rises,
    an untrained model's tiny steps (`tiny`) go at once to where the best ones may lie, and a pretrained model's move
    may go up to `furthest`, the further the more significant it is. In its first window it goes to
    short of where a parabola in the rate has its bottom (`Estimate.bottom`), if that is further.

    Args:
        significance: |t| at the last weights from which they are believed.
        limit: largest move, in coordinates, but for those.
        ceiling: largest shift that a move from tiny steps, or of a pretrained model's first window, leads to.

    >>> Raise().propose(Raise().start(), Estimate(slope=-0.3, curvature=1.0, stderr=0.1), Context())
    0.3
    """

    limit: float = Field(default=0.5, gt=0, le=10)

    def wants_curvature(self, slope: Estimate, *, averaged: bool = False) -> bool:
        return not averaged and slope.t_of_eight < -self.significance

    def propose(self, state: Beginning, estimate: Estimate, context: Context) -> float | None:
        if estimate.t_of_eight >= -self.significance:
            return None
        limit = self.limited(self.limit, state, estimate)
        return self.at_least(newton_move(estimate, limit), state, estimate, context)
