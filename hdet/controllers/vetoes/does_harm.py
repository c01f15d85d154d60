"""A knob too weak to do harm need not be lowered."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import Veto
from hdet.spec import register


@register
class DoesHarm(Veto):
    """Lower only a knob whose |slope| is at least `min_harm` times the level. Without a level nothing is lowered.

    >>> DoesHarm().allow(-0.1, DoesHarm().start(), Estimate(slope=1e-4, level=1.0), Context())
    0.0
    """

    min_harm: float = Field(default=1e-3, ge=0)

    def allow(self, move: float, state: Any, estimate: Estimate, context: Context) -> float:
        if move >= 0:
            return move
        return move if estimate.level and estimate.relative_slope >= self.min_harm else 0.0
