"""What was measured over a small range says little of what is far outside it."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import Veto
from hdet.spec import register


@register
class WithinSpan(Veto):
    """Raise by no more than `max_extrapolation` times the range that was measured (`Estimate.span`).

    Where decay moves weights by more than the evidence's `reach` in a window, only a smaller change of it was measured.
    Without a span nothing is raised.

    >>> veto = WithinSpan()
    >>> veto.allow(0.3, veto.start(), Estimate(slope=-0.1, span=0.1), Context())
    0.2
    """

    max_extrapolation: float = Field(default=2.0, gt=0, le=100)

    def allow(self, move: float, state: Any, estimate: Estimate, context: Context) -> float:
        if move <= 0:
            return move
        return 0.0 if estimate.span is None else min(move, self.max_extrapolation * estimate.span)
