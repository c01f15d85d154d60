"""A rate whose first steps are many times the weights is cut back at once."""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import Field

from hdet.controllers.beginning import HUGE, Beginning, OfBeginning
from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import SlopeRule
from hdet.spec import register


@register
class CutBack(OfBeginning, SlopeRule):
    """Go down at once to where steps are large, if an untrained model's steps at the base are huge.

    It judges estimates taken ahead of the base (`Estimate.offset`), early in a warm-up, and is silent where these call
    for more (`t < -significance`). Steps that large ruin attention before evidence has lowered the rate far enough.
    With the numbers below a move is one by a factor of 4 at the least, after which `hdet.Rewind()` begins anew.

    Args:
        huge: `step_size` above which steps are huge; 0 cuts nothing back. At the best rates of 13 tasks by AdamW, of
            untrained models, it is 0.13 to 3.7, and at one beside a strong decay 8.3.
        cut_to: `step_size` that the rate goes down to, beside the weights at the end of the window.
        significance: |t| at the last weights from which they are believed.

    >>> rule, huge = CutBack(), Estimate(slope=0.1, stderr=0.1, step_size=24.0, offset=0.7)
    >>> begun = rule.begin(rule.start(), Estimate(slope=0.0, excess=1.0))
    >>> round(rule.propose(begun, huge, Context()), 3)  # to an eighth
    -2.079
    """

    looks_ahead: ClassVar[bool] = True

    huge: float = Field(default=HUGE, ge=0, le=1000)
    cut_to: float = Field(default=3.0, gt=0, le=1000)
    significance: float = Field(default=2.0, gt=0, le=100)

    def propose(self, state: Beginning, estimate: Estimate, context: Context) -> float | None:
        size = estimate.step_size
        if not state.untrained or not size or not 0.0 < self.huge < size or estimate.t_of_eight < -self.significance:
            return None
        move = math.log(self.cut_to / size)
        return move if move < 0.0 else None
