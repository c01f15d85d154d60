"""How far held-out loss is above training loss: how far a model overfits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate

# Share of the mean gap that is kept from window to window: a memory of about three windows.
_KEPT = 0.7
# Gap of the first windows, as a share of the held-out loss, above which the two losses are not on one scale: nothing
# can be overfitted as early. A training loss that was divided by two or more micro-batches is further below.
OTHER_SCALE = 0.25
DECIDED = 3


def told_of_scale(told: int, shows_it: bool) -> tuple[int, bool]:
    """Whether losses are on two scales: where the first window shows it, and one of the two after it.

    In one window steps that are far too large may have raised the held-out loss by as much, and in one a training loss
    that fell fast may hide what it was divided by.

    Args:
        told: what the windows before have told, of those that say (0 at first).
        shows_it: whether the window's gap does.

    Returns:
        What they have told now, up to 3, which nothing changes any more, and whether losses count as on two scales.

    >>> told_of_scale(0, False)
    (3, False)
    >>> told_of_scale(*told_of_scale(0, True)[:1], False), told_of_scale(2, False)
    ((2, True), (3, False))
    """
    if told == 0:
        return (1, True) if shows_it else (DECIDED, False)
    return (DECIDED, True) if shows_it else (told + 1, told + 1 < DECIDED)


@dataclass(frozen=True)
class GapState:
    """How far held-out loss is above training loss.

    Attributes:
        mean: as a share of the held-out loss, over about three windows.
        weight: of the windows in that mean.
        told: what the first windows have told of the losses' scale; see `told_of_scale`.
        other_scale: whether the two are not on one scale.
    """

    mean: float = 0.0
    weight: float = 0.0
    told: int = 0
    other_scale: bool = False

    def after(self, estimate: Estimate, context: Context) -> GapState:
        """The state after a window; the same where the window tells no gap."""
        gap = gap_of(estimate, context)
        if gap is None:
            return self
        state = self.of_scale(gap)
        # What a window seemed to tell that showed two scales where there is one was no gap.
        kept = 0.0 if self.other_scale and not state.other_scale else _KEPT * self.weight
        weight = kept + 1.0
        return replace(state, mean=self.mean + (gap - self.mean) / weight, weight=weight)

    def of_scale(self, gap: float) -> GapState:
        """The state after a window whose gap tells of the losses' scale alone."""
        if self.told == DECIDED:
            return self
        told, other_scale = told_of_scale(self.told, gap > OTHER_SCALE)
        return replace(self, told=told, other_scale=other_scale)

    def forgotten(self) -> GapState:
        """The state after the run went back: whether the losses are on one scale is still known."""
        return GapState(told=self.told, other_scale=self.other_scale)


def gap_of(estimate: Estimate, context: Context) -> float | None:
    """The window's gap as a share of the held-out loss, at most 1 either way; None where a loss is not known."""
    level, loss = estimate.level, context.loss
    if not level or loss is None or not (math.isfinite(level) and math.isfinite(loss)):
        return None
    return max(-1.0, min(1.0, (level - loss) / abs(level)))
