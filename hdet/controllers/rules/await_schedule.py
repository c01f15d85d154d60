"""A rate that was raised above the schedule as given waits for the schedule to come up to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pydantic import Field

from hdet.controllers.beginning import Beginning, OfSmallSteps
from hdet.controllers.controller import ROUNDING, Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import SlopeRule
from hdet.spec import register


@dataclass(frozen=True)
class AwaitScheduleState(Beginning):
    """How training has begun.

    Attributes:
        rise: what the schedule has risen by since the window before, in coordinates.
        peak: the highest that it has stood at, as far as that was known; 0 where it was not.
        owed: by how much a schedule whose course nobody knew has come to stand higher, of which nothing is taken back.
    """

    rise: float = 0.0
    peak: float = 0.0
    owed: float = 0.0


@register
class AwaitSchedule(OfSmallSteps, SlopeRule):
    """Hold a rate that lies above the schedule as given during its warm-up, if the last weights call for less.

    Evidence for a raise is gathered early in the warm-up, where the rate is far below its peak. It proves that a higher
    rate is right there, not that the peak is too low. So where the last weights then call for less
    (`t > significance`), the base goes down by what the schedule has risen by since the window before, and no further
    than to the schedule as given. While an untrained model warms up, a rate whose steps are small goes on rising. Of a
    pretrained one it says nothing: there the first windows call for no more than later ones can bear.

    Where nobody knew that the schedule would rise, as in a warm-up that is stepped once an epoch and only followed,
    what was proved was proved of that rate. So what it then rises by, above all it has stood at, is taken back in the
    next window that is judged, whatever the weights call for.

    Args:
        significance: t at the last weights from which they are believed.
        within: largest shift at which it speaks; by default a factor of the square root of 10. What was set is
            a guess as good as that, and one that was passed by more was wrong.

    >>> rule, less = AwaitSchedule(), Estimate(slope=0.3, stderr=0.1)
    >>> state = rule.observe(rule.start(), less, Context(schedule_next=0.4))
    >>> risen = Context(schedule_next=0.5, shift=0.6)
    >>> round(rule.propose(rule.observe(state, less, risen), less, risen), 3)
    -0.223
    """

    significance: float = Field(default=2.0, gt=0, le=100)
    within: float = Field(default=math.log(10.0) / 2, gt=0, le=100)

    def start(self) -> AwaitScheduleState:
        return AwaitScheduleState()

    def observe(self, state: AwaitScheduleState, estimate: Estimate, context: Context) -> AwaitScheduleState:
        now, last = context.schedule_next, state.last
        seen: AwaitScheduleState = super().observe(state, estimate, context)
        peak = context.peak if math.isfinite(context.peak) else state.peak
        unforeseen = math.log(peak / state.peak) if peak > state.peak > 0.0 else 0.0
        owed = min(state.owed + unforeseen, max(0.0, context.shift))
        return replace(seen, rise=math.log(now / last) if now > last > 0.0 else 0.0, peak=peak, owed=owed)

    def moved(
        self, state: AwaitScheduleState, wish: float, move: float, estimate: Estimate, context: Context
    ) -> AwaitScheduleState:
        return replace(state, owed=max(0.0, state.owed + min(0.0, move)))

    def propose(self, state: AwaitScheduleState, estimate: Estimate, context: Context) -> float | None:
        if state.owed > ROUNDING:
            return -state.owed
        if state.fell or state.pretrained or not 0.0 < context.shift <= self.within:
            return None
        if estimate.t_of_eight <= self.significance:
            return None
        move = min(context.shift, state.rise)
        if state.untrained and estimate.step_size and self.small > 0.0:
            move = min(move, math.log(estimate.step_size / self.small))
        return -move if move > 0.0 else None
