"""A rate whose steps hardly change anything is too low, even where no window says so."""

from __future__ import annotations

import math
from dataclasses import replace

from pydantic import Field

from hdet.controllers.beginning import Beginning, OfBeginning
from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import Rule
from hdet.spec import register


@register
class CatchUp(OfBeginning, Rule):
    """Go up to where steps begin to matter, above the schedule as given too, until evidence has lowered the base.

    In large models hardly a window calls for more, at a tenth of the best rate either. So this is the last rule to be
    asked, and where averaged weights call for less, another speaks. It does not look ahead: it speaks in the part of
    the warm-up that is no longer looked ahead of.

    Args:
        too_small: `step_size` below which a rate is taken to be too low; 0 leaves all as they are. At the best rates of
            13 tasks by AdamW it is 0.13 to 3.7, and at a rate twice too high a run loses little.
        catch_up_step: largest move, in coordinates.
        ceiling: largest shift that it raises to.

    >>> rule, tiny = CatchUp(), Estimate(slope=0.0, stderr=0.1, step_size=0.15)
    >>> begun = rule.begin(rule.start(), Estimate(slope=0.0, excess=1.0))
    >>> round(rule.propose(begun, tiny, Context()), 3)
    0.693
    """

    too_small: float = Field(default=0.3, ge=0, le=100)
    catch_up_step: float = Field(default=1.0, gt=0, le=10)
    ceiling: float = 5.0

    def wants_curvature(self, slope: Estimate, *, averaged: bool = False) -> bool:
        return False

    def propose(self, state: Beginning, estimate: Estimate, context: Context) -> float | None:
        size = estimate.step_size
        if not state.untrained or not size or size >= self.too_small:
            return None
        room = min(self.ceiling - context.shift, math.log(self.too_small / size))
        return min(self.catch_up_step, room) if room > 0 else None

    def moved(self, state: Beginning, wish: float, move: float, estimate: Estimate, context: Context) -> Beginning:
        return replace(state, untrained=False) if move < 0 and estimate.offset <= 0 else state
