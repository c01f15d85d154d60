"""What the user set is the better guess, until something speaks against it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pydantic import Field

from hdet.controllers.beginning import HUGE, Beginning, OfSmallSteps, huge_as_given
from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import SlopeRule
from hdet.spec import register


@dataclass(frozen=True)
class ReturnState(Beginning):
    """How training has begun.

    Attributes:
        waits: windows on end that have to pass without a call for less before it speaks, since something else than
            looking ahead has lowered the base.
        looked: whether looking ahead has.
        huge: whether steps at the schedule as given would have been huge, while `untrained` held.
        goal: the shift at which a pretrained model's first window proved the rate to be best; 0 where it did not.
    """

    waits: float = 0.0
    looked: bool = False
    huge: bool = False
    goal: float = 0.0


@register
class Return(OfSmallSteps, SlopeRule):
    """Go back up to the schedule as given (a shift of 0), where nothing calls for less any more.

    Early in a run the loss is sharper than it will be, and looking ahead lowers too far. Last weights that call for
    less (`t > significance`) hold the base, unless averaged weights call for more (`t < -significance`): in
    large models the last weights call for less in most windows, whatever the rate.

    On a plateau evidence may lower too far as well. What anything but looking ahead has lowered goes back once last
    weights have not called for less in `quiet_windows` windows on end. What a guard that goes back has lowered stays,
    and what evidence has lowered while a pretrained model warms up.

    In fine-tuning, too, last weights call for less at any rate. As long as a pretrained model's schedule has not fallen
    and looking ahead has lowered nothing, the base lies low for no other reason than that it was entered so. There
    averaged weights hold it (`t > significance`), and last ones from `entered_significance` on. It goes on to where the
    first window proved the rate to be best (`Estimate.bottom`), which raises stop short of: later windows see no
    further than their own end. That is counted from where the window read, ahead of the base (`Estimate.offset`); a
    raise counts from the base. Where that is above the schedule as given, it goes on to there after looking ahead has
    lowered the base, too.

    While an untrained model warms up, looking ahead lowers no rate below where its steps are small
    (`hdet.controllers.vetoes.SmallSteps`), and there is nothing to make up for beyond. So it goes no further than there
    where `t >= 0` at the last weights. Once the warm-up is over, steps have no size and it goes on, but to no schedule
    as given whose steps would have been huge.

    Args:
        significance: |t| from which last and averaged weights are believed.
        entered_significance: t of the last weights of a pretrained model whose base nothing has lowered, or only
            looking ahead below a proven best rate. Up to `significance` such a base is as any other.
        quiet_windows: windows on end without a call for less that outweigh the evidence that lowered the base; 1000,
            which are more than a run has, make it stay.
        return_step: largest move, in coordinates.
        ceiling: largest shift that it leads to, of a pretrained model; 0 is never above the schedule as given.
        huge: `step_size` of the schedule as given above which that is no guess; 0 takes any for one.

    >>> Return().propose(Return().start(), Estimate(slope=0.0, stderr=0.1), Context(shift=-0.6))
    0.25
    """

    significance: float = Field(default=2.0, gt=0, le=100)
    entered_significance: float = Field(default=100.0, gt=0, le=100)
    quiet_windows: int = Field(default=2, ge=1, le=1000)
    return_step: float = Field(default=0.25, ge=0, le=10)
    ceiling: float = Field(default=5.0, ge=0)
    huge: float = Field(default=HUGE, ge=0, le=1000)

    def start(self) -> ReturnState:
        return ReturnState()

    def observe(self, state: ReturnState, estimate: Estimate, context: Context) -> ReturnState:
        seen: ReturnState = super().observe(state, estimate, context)
        if estimate.pretrained and estimate.bottom is not None:
            goal = context.shift + estimate.offset + estimate.bottom
            seen = replace(seen, goal=min(max(0.0, goal), self.ceiling))
        if seen.waits > 0:
            less = estimate.t_of_eight > self.significance
            seen = replace(seen, waits=max(seen.waits, float(self.quiet_windows)) if less else seen.waits - 1)
        return replace(seen, huge=seen.huge or (seen.untrained and huge_as_given(estimate, context, self.huge)))

    def propose(self, state: ReturnState, estimate: Estimate, context: Context) -> float | None:
        as_entered = state.pretrained and (state.goal > 0.0 or not state.looked)
        as_entered = as_entered and self.entered_significance > self.significance
        step = min(self.return_step, (state.goal if as_entered else 0.0) - context.shift)
        room = self.room(state, estimate, context)
        if room is not None and estimate.t_of_eight >= 0.0:
            step = min(step, room)
        averaged = estimate.averaged.t_of_eight if estimate.averaged is not None and estimate.averaged.testable else 0.0
        believed = self.entered_significance if as_entered else self.significance
        held = estimate.t_of_eight > believed and averaged >= -self.significance
        held = held or (as_entered and averaged > self.significance)
        over = state.huge and room is None
        return None if state.waits > 0 or over or held or step <= 0.0 else step

    def moved(self, state: ReturnState, wish: float, move: float, estimate: Estimate, context: Context) -> ReturnState:
        if move >= 0:
            return state
        if estimate.offset > 0:
            return replace(state, looked=True)
        return replace(state, waits=math.inf if state.pretrained else max(state.waits, float(self.quiet_windows)))

    def retreat(self, state: ReturnState, context: Context) -> ReturnState:
        return ReturnState(waits=math.inf)
