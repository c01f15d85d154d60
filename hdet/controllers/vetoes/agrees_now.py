"""What adds up over windows is of the past; the window that has closed may say otherwise."""

from __future__ import annotations

from typing import Any

from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import Veto
from hdet.spec import register


@register
class AgreesNow(Veto):
    """Forbid a move that goes up the slope of the window that has closed.

    >>> AgreesNow().allow(0.1, AgreesNow().start(), Estimate(slope=0.2), Context())
    0.0
    """

    def allow(self, move: float, state: Any, estimate: Estimate, context: Context) -> float:
        return 0.0 if move * estimate.slope > 0 else move
