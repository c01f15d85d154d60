"""How a schedule falls: slower where nothing is overfitted, faster where it is."""

from __future__ import annotations

from pydantic import Field

from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.gap import GapState, gap_of
from hdet.controllers.part import SlopeRule
from hdet.spec import register


@register
class Fall(SlopeRule):
    """Once a schedule falls, take what is left of its fall to a power, by how far the model overfits.

    With gap = (held-out loss - training loss) / held-out loss, a mean over about three windows, the power is

        min(least + gain max(gap, 0), most).

    It asks for no move. A window that does not tell both losses, or one of them as 0 or less, keeps the mean of those
    before, and where none has told them the fall stays as given. So it does where the training loss is far below the
    held-out one from the beginning, since the two are not on one scale (see `hdet.controllers.vetoes.NeedsGap`); a
    training loss that is too high for what it is compared with shows nowhere.

    Args:
        least: power where nothing is overfitted; 1 is the schedule as given.
        gain: of the power over that of the gap.
        most: largest power.
        most_decay_shift: how far weight decay may have been moved either way, in its coordinates (logarithms by
            default); beyond, the fall goes on as given. Decay acts through the rate, so a rate that falls otherwise
            would undo what has been learned of it, or overdo it.

    >>> fall, falling = Fall(), Context(schedule_now=1.0, schedule_next=0.9, total_steps=100, loss=0.8)
    >>> estimate = Estimate(slope=0.0, stderr=0.1, level=1.0)
    >>> fall.power(fall.observe(fall.start(), estimate, falling), estimate, falling)
    1.15
    """

    least: float = Field(default=0.75, gt=0, le=1)
    gain: float = Field(default=2.0, ge=0, le=100)
    most: float = Field(default=1.5, ge=1, le=10)
    most_decay_shift: float = Field(default=0.4, ge=0)

    def start(self) -> GapState:
        return GapState()

    def observe(self, state: GapState, estimate: Estimate, context: Context) -> GapState:
        told = min(estimate.level or 0.0, context.loss or 0.0) > 0.0  # a share of nothing, or of less, is none
        if not told:
            return state
        if estimate.offset <= 0:
            return state.after(estimate, context)
        gap = gap_of(estimate, context)  # while it looks ahead, of the losses' scale alone
        return state if gap is None else state.of_scale(gap)

    def retreat(self, state: GapState, context: Context) -> GapState:
        return state.forgotten()

    def propose(self, state: GapState, estimate: Estimate, context: Context) -> float | None:
        return None

    def power(self, state: GapState, estimate: Estimate, context: Context) -> float | None:
        if context.total_steps is None or context.schedule_next >= context.schedule_now or state.weight == 0.0:
            return None
        if state.other_scale or context.decay_shift > self.most_decay_shift:
            return 1.0
        return min(self.least + self.gain * max(0.0, state.mean), self.most)
