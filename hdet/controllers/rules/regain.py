"""A rate that was entered from below for caution goes up at once where there is nothing to be cautious about."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hdet.controllers.beginning import HarmlessState, OfHarmlessSteps
from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import SlopeRule
from hdet.spec import register


@register
class Regain(OfHarmlessSteps, SlopeRule):
    """Go up to where steps are no longer small, and no further than to the schedule as given (a shift of 0).

    It judges estimates taken ahead of the base (`Estimate.offset`), early in a warm-up. Where they call for more
    (`t < -significance`), it leaves the raise to `LookAhead`. It is silent once a line has shown that small steps wreck
    the network.

    Args:
        significance: |t| at the last weights from which they are believed.

    >>> rule, cautious = Regain(), Estimate(slope=0.3, stderr=0.1, level=3.0, step_size=0.1, offset=0.7)
    >>> begun = rule.begin(rule.start(), Estimate(slope=0.0, excess=1.0))
    >>> round(rule.propose(begun, cautious, Context(shift=-1.386)), 3)
    1.386
    """

    looks_ahead: ClassVar[bool] = True

    significance: float = Field(default=2.0, gt=0, le=100)

    def propose(self, state: HarmlessState, estimate: Estimate, context: Context) -> float | None:
        room = self.room(state, estimate, context)
        return None if room is None or room <= 0 or estimate.t_of_eight < -self.significance else room
