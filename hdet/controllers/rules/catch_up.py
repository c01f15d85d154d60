"""A rate whose steps hardly change anything is too low, even where no window says so."""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import Field

from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import Rule
from hdet.controllers.small_steps import Beginning, OfUntrained
from hdet.spec import register


@register
class CatchUp(OfUntrained, Rule):
    """Go up at once to where steps begin to matter, above the schedule as given too.

    In large models hardly a window calls for more, at a tenth of the best rate either. So this is the last rule to be
    asked: where averaged weights call for less, another speaks. No proof is asked of it (`final`).

    Args:
        least: `step_size` below which a rate is taken to be too low; 0 leaves all as they are. At the best rates of 15
            tasks by AdamW it is 0.13 to 8, and at a rate twice too high a run loses little.

    >>> from dataclasses import replace
    >>> rule, tiny = CatchUp(), Estimate(slope=0.0, stderr=0.1, step_size=0.03)
    >>> begun = rule.observe(rule.start(), replace(tiny, untrained=True), Context())
    >>> round(rule.propose(begun, tiny, Context()), 3)
    2.303
    """

    final: ClassVar[bool] = True

    least: float = Field(default=0.3, ge=0, le=100)

    def wants_curvature(self, slope: Estimate, *, averaged: bool = False) -> bool:
        return False

    def propose(self, state: Beginning, estimate: Estimate, context: Context) -> float | None:
        size = estimate.step_size
        return math.log(self.least / size) if state.untrained and size and size < self.least else None
