"""What the user set is information: to leave it upwards takes the more proof the further it goes."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field

from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import Veto
from hdet.spec import register


@register
class AboveGiven(Veto):
    """Above the schedule as given, raise only on `t < -significance (1 + shift / doubled_at)`.

    Early in training larger steps look better than they are, by an error that no standard error tells. Where a plateau
    shows little either way, each window would raise a rate that was set well. Where the rate is far too low, windows
    prove it many times over.

    Args:
        significance: |t| that is asked for at the schedule as given, and below it.
        doubled_at: shift at which twice as much is asked for; by default a factor of 3.

    >>> above = Context(shift=math.log(3.0))
    >>> [AboveGiven().allow(0.5, AboveGiven().start(), Estimate(slope=-t, stderr=1.0), above) for t in (3.0, 5.0)]
    [0.0, 0.5]
    """

    significance: float = Field(default=2.0, gt=0, le=100)
    doubled_at: float = Field(default=math.log(3.0), gt=0)

    def allow(self, move: float, state: Any, estimate: Estimate, context: Context) -> float:
        if move <= 0 or context.shift <= 0:
            return move
        return move if estimate.t < -self.significance * (1.0 + context.shift / self.doubled_at) else 0.0
