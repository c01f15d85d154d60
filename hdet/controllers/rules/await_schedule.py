"""A rate that was raised above the schedule as given waits for the schedule to come up to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pydantic import Field

from hdet.controllers.beginning import Beginning, OfSmallSteps
from hdet.controllers.controller import ROUNDING, Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import Rule
from hdet.spec import register


@dataclass(frozen=True)
class AwaitScheduleState(Beginning):
    """How training has begun.

    Attributes:
        rise: what the schedule has risen by since the window before, in coordinates.
        peak: the highest that it has stood at, as far as that was known; 0 where it was not.
        owed: by how much a schedule whose course nobody knew has come to stand higher, of which nothing is taken back.
        first: the mean training loss of the first window that was judged; infinite where nobody knows it.
        lowest: the lowest of a window.
        plateau: the shift after the last window on the plateau that training begins with.
    """

    rise: float = 0.0
    peak: float = 0.0
    owed: float = 0.0
    first: float = math.inf
    lowest: float = math.inf
    plateau: float = 0.0


@register
class AwaitSchedule(OfSmallSteps, Rule):
    """Hold a rate that lies above the schedule as given during its warm-up, if the last weights call for less.

    Evidence for a raise is gathered early in the warm-up, where the rate is far below its peak. It proves that a higher
    rate is right there, not that the peak is too low. So where the last weights then call for less
    (`t > significance`), the base goes down by what the schedule has risen by since the window before, and no further
    than to the schedule as given. While an untrained model warms up, a rate whose steps are small goes on rising. Of a
    pretrained one it says nothing: there the first windows call for no more than later ones can bear.

    On a plateau that training begins with, any rate is called too low, for as long as it lasts. So what the base was
    raised to there is no proof at any distance above the schedule, and it goes down by `back` in every window in which
    the schedule has risen by less. The loss is compared with its own size: one that never comes near 0, or is negative,
    hides a plateau or lengthens it.

    Where nobody knew that the schedule would rise, as in a warm-up that is stepped once an epoch and only followed,
    what was proved was proved of that rate. So what it then rises by, above all it has stood at, is taken back in the
    next window that is judged, whatever the weights call for.

    Args:
        significance: t at the last weights from which they are believed.
        within: largest shift at which it speaks, but for that; by default a factor of the square root of 10. What was
            set is a guess as good as that, and one that was passed by more was wrong.
        fallen: share of the first window's training loss by which a later one's is lower once the plateau is over; 0
            knows of no plateau.
        back: move of a base that was raised on the plateau, in coordinates, if the schedule has risen by less.

    >>> rule, less = AwaitSchedule(), Estimate(slope=0.3, stderr=0.1)
    >>> state = rule.observe(rule.start(), less, Context(schedule_next=0.4))
    >>> risen = Context(schedule_next=0.5, shift=0.6)
    >>> round(rule.propose(rule.observe(state, less, risen), less, risen), 3)
    -0.223
    """

    significance: float = Field(default=2.0, gt=0, le=100)
    within: float = Field(default=math.log(10.0) / 2, gt=0, le=100)
    fallen: float = Field(default=0.2, ge=0, lt=1)
    back: float = Field(default=0.25, ge=0, le=10)

    def wants_curvature(self, slope: Estimate, *, averaged: bool = False) -> bool:
        return False

    def start(self) -> AwaitScheduleState:
        return AwaitScheduleState()

    def observe(self, state: AwaitScheduleState, estimate: Estimate, context: Context) -> AwaitScheduleState:
        now, last = context.schedule_next, state.last
        seen: AwaitScheduleState = super().observe(state, estimate, context)
        peak = context.peak if math.isfinite(context.peak) else state.peak
        unforeseen = math.log(peak / state.peak) if peak > state.peak > 0.0 else 0.0
        owed = min(state.owed + unforeseen, max(0.0, context.shift))
        seen = replace(seen, rise=math.log(now / last) if now > last > 0.0 else 0.0, peak=peak, owed=owed)
        if context.loss is None:
            return seen
        first = state.first if math.isfinite(state.first) else context.loss
        return replace(seen, first=first, lowest=min(state.lowest, context.loss))

    def moved(
        self, state: AwaitScheduleState, wish: float, move: float, estimate: Estimate, context: Context
    ) -> AwaitScheduleState:
        on_plateau = math.isfinite(state.first) and state.lowest > (1.0 - self.fallen) * state.first
        plateau = context.shift + move if on_plateau else state.plateau
        return replace(state, owed=max(0.0, state.owed + min(0.0, move)), plateau=plateau)

    def retreat(self, state: AwaitScheduleState, context: Context) -> AwaitScheduleState:
        return replace(self.start(), first=state.first, lowest=state.lowest)

    def restart(self, state: AwaitScheduleState, context: Context) -> AwaitScheduleState:
        anew: AwaitScheduleState = super().restart(state, context)
        return replace(anew, first=math.inf, lowest=math.inf, plateau=0.0)

    def propose(self, state: AwaitScheduleState, estimate: Estimate, context: Context) -> float | None:
        if state.owed > ROUNDING:
            return -state.owed
        if state.fell or state.pretrained or state.rise <= 0.0 or estimate.t_of_eight <= self.significance:
            return None
        raised_there = context.shift <= state.plateau + ROUNDING
        if context.shift > self.within and not raised_there:
            return None
        move = min(context.shift, max(state.rise, self.back) if raised_there else state.rise)
        if state.untrained and estimate.step_size and self.small > 0.0:
            move = min(move, math.log(estimate.step_size / self.small))
        return -move if move > 0.0 else None
