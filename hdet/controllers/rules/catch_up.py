"""A rate whose steps hardly change anything is too low, even where no window says so."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pydantic import Field

from hdet.controllers.beginning import LOWEST_BEST, Beginning, OfBeginning
from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import SlopeRule
from hdet.spec import register


@dataclass(frozen=True)
class CatchUpState(Beginning):
    """How training has begun.

    Attributes:
        misled: whether a window has called for less where steps were far too small for it, while `untrained` held.
    """

    misled: bool = False


@register
class CatchUp(OfBeginning, SlopeRule):
    """Go up to where steps begin to matter, above the schedule as given too, until evidence has lowered the base.

    In large models hardly a window calls for more, at a tenth of the best rate either. So this is the last rule to be
    asked, and where averaged weights call for less, another speaks. It does not look ahead: it speaks in the part of
    the warm-up that is no longer looked ahead of.

    Where a window calls for less although steps are less than half of those at any of the best rates of 13 tasks by
    AdamW (`LOWEST_BEST`), evidence is taken to mislead, and this rule goes further.

    Args:
        too_small: `step_size` below which a rate is taken to be too low; 0 leaves all as they are. At the best rates of
            13 tasks by AdamW it is 0.13 to 3.7, and at a rate twice too high a run loses little.
        misled_to: the same once evidence has misled, if it is larger.
        tiny: `step_size` below which a window that calls for less misleads; 0 takes none to mislead.
        misleading: t at the last weights above which it does.
        catch_up_step: largest move, in coordinates.
        ceiling: largest shift that it raises to.

    >>> rule, small = CatchUp(), Estimate(slope=0.0, stderr=0.1, step_size=0.15)
    >>> begun = rule.begin(rule.start(), Estimate(slope=0.0, excess=1.0))
    >>> misled = rule.observe(begun, Estimate(slope=0.5, stderr=0.1, step_size=0.01), Context())
    >>> [round(rule.propose(state, small, Context()), 3) for state in (begun, misled)]
    [0.693, 1.0]
    """

    too_small: float = Field(default=0.3, ge=0, le=100)
    misled_to: float = Field(default=0.5, ge=0, le=100)
    tiny: float = Field(default=0.06, ge=0, le=LOWEST_BEST)
    misleading: float = Field(default=4.0, gt=0, le=100)
    catch_up_step: float = Field(default=1.0, gt=0, le=10)
    ceiling: float = 5.0

    def start(self) -> CatchUpState:
        return CatchUpState()

    def observe(self, state: CatchUpState, estimate: Estimate, context: Context) -> CatchUpState:
        seen: CatchUpState = super().observe(state, estimate, context)
        size = estimate.step_size
        if not seen.untrained or not size or size >= self.tiny or not estimate.t_of_eight > self.misleading:
            return seen
        return replace(seen, misled=True)

    def propose(self, state: CatchUpState, estimate: Estimate, context: Context) -> float | None:
        size, limit = estimate.step_size, self.too_small
        if limit and state.misled:
            limit = max(limit, self.misled_to)
        if not state.untrained or not size or size >= limit:
            return None
        room = min(self.ceiling - context.shift, math.log(limit / size))
        return min(self.catch_up_step, room) if room > 0 else None

    def moved(
        self, state: CatchUpState, wish: float, move: float, estimate: Estimate, context: Context
    ) -> CatchUpState:
        return replace(state, untrained=False) if move < 0 and estimate.offset <= 0 else state
