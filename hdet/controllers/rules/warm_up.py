"""Early in a warm-up small steps look too small only because the schedule is low."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import SlopeRule
from hdet.spec import register


@register
class WarmUp(SlopeRule):
    """Hold until a rising schedule has reached the share `trusted_from` of its peak.

    >>> WarmUp().propose(WarmUp().start(), Estimate(slope=-0.3), Context(schedule_now=0.1, warming=True))
    0.0
    """

    trusted_from: float = Field(default=0.25, ge=0, le=1)

    def propose(self, state: Any, estimate: Estimate, context: Context) -> float | None:
        return 0.0 if context.warming and context.fraction < self.trusted_from else None
