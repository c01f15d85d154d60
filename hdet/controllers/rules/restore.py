"""A knob that was lowered early goes back to what was set, once slopes have stopped calling for less."""

from __future__ import annotations

from pydantic import Field

from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.rules.slope_sum import SlopeSumState, SummedSlopes
from hdet.spec import register


@register
class Restore(SummedSlopes):
    """Go back up to the schedule as given (a shift of 0) where the sum of slopes calls for less no more.

    Nearly every model calls for less decay while it learns its first things, and no window later proves what that cost.
    So a base that was lowered stays there only as long as windows go on to call for it. One that was lowered far was
    given wrong, and stays.

    Args:
        silent_below: tau above which the sum still calls for less; the base is held there.
        max_distance: largest distance below the schedule as given, in coordinates, from which it brings a base back.
        return_step: largest move, in coordinates.
        restore_after: share of the run from which it speaks; a run without a known end has no share.
        memory: share of the sum that is kept over `window_steps` steps.
        window_steps: steps of a window that `memory` is meant for.

    >>> rule = Restore()
    >>> lowered, quiet = Context(shift=-0.6), Estimate(slope=0.0, stderr=0.1)
    >>> rule.propose(rule.observe(rule.start(), quiet, lowered), quiet, lowered)
    0.25
    """

    silent_below: float = Field(default=1.0, ge=-100, le=100)
    max_distance: float = Field(default=1.0, gt=0, le=100)
    return_step: float = Field(default=0.25, gt=0, le=10)
    restore_after: float = Field(default=0.3, ge=0, le=1)

    def propose(self, state: SlopeSumState, estimate: Estimate, context: Context) -> float | None:
        if context.before(self.restore_after):
            return None
        step = min(self.return_step, -context.shift)
        near = context.base > 0.0 and -context.shift <= self.max_distance
        return step if step > 0.0 and near and state.tau <= self.silent_below else None
