"""How far held-out loss is above training loss: how far a model overfits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate

# Share of the mean gap that is kept from window to window: a memory of about three windows.
_KEPT = 0.7
# Gap of the first windows, as a share of the held-out loss, above which the two losses are not on one scale: nothing
# can be overfitted as early. A training loss that was divided by two or more micro-batches is further below.
OTHER_SCALE = 0.25
# Of how many windows all have to show it: in one, steps that are far too large may have raised the loss by as much.
SHOW_IT = 3


@dataclass(frozen=True)
class GapState:
    """How far held-out loss is above training loss.

    Attributes:
        mean: as a share of the held-out loss, over about three windows.
        weight: of the windows in that mean.
        told: how many windows have told a gap, of the first few.
        other_scale: whether all of these showed two losses that are not on one scale.
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
        weight = _KEPT * self.weight + 1.0
        other_scale = self.other_scale
        if self.told < SHOW_IT:
            other_scale = gap > OTHER_SCALE and (other_scale or self.told == 0)
        told = min(self.told + 1, SHOW_IT)
        return GapState(self.mean + (gap - self.mean) / weight, weight, told, other_scale)

    def forgotten(self) -> GapState:
        """The state after the run went back: whether the losses are on one scale is still known."""
        return GapState(told=self.told, other_scale=self.other_scale)


def gap_of(estimate: Estimate, context: Context) -> float | None:
    """The window's gap as a share of the held-out loss; None where one of the losses is not known."""
    level, loss = estimate.level, context.loss
    if not level or loss is None or not (math.isfinite(level) and math.isfinite(loss)):
        return None
    return max(-1.0, min(1.0, (level - loss) / abs(level)))
