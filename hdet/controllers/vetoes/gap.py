"""How far held-out loss is above training loss says whether a restraint on the weights is wanted."""

from __future__ import annotations

from pydantic import Field

from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.gap import GapState, gap_of
from hdet.controllers.part import Veto
from hdet.spec import register


class _Gap(Veto):
    """Keeps the mean gap. A move is forbidden where the gap of the window that has closed is not known."""

    def start(self) -> GapState:
        return GapState()

    def observe(self, state: GapState, estimate: Estimate, context: Context) -> GapState:
        return state.after(estimate, context)

    def retreat(self, state: GapState, context: Context) -> GapState:
        return state.forgotten()

    @staticmethod
    def _is_known(state: GapState, estimate: Estimate, context: Context) -> bool:
        return gap_of(estimate, context) is not None and not state.other_scale


@register
class NeedsGap(_Gap):
    """Raise only where held-out loss is above training loss: a model that does not overfit needs no more restraint.

    A training loss above the held-out one is of another kind (dropout, label smoothing, a penalty), or of a window in
    which the loss fell fast. It tells of no overfitting, so a raise then ends at the schedule as given (a shift of 0).
    Both losses must be known, and on one scale: a held-out loss that is above the training loss by a quarter of itself
    in the first window that tells both, and in one of the two after it, shows one that was divided by the number of
    micro-batches.

    Args:
        min_gap: smallest |held-out loss - training loss|, as a share of the held-out loss.

    >>> veto, raising = NeedsGap(), Estimate(slope=-0.1, stderr=0.01, level=1.0)
    >>> for loss in (0.9, 1.0, 1.1):
    ...     context = Context(loss=loss, shift=-0.1)
    ...     print(veto.allow(0.5, veto.observe(veto.start(), raising, context), raising, context))
    0.5
    0.0
    0.1
    """

    min_gap: float = Field(default=0.02, ge=0, le=1)

    def allow(self, move: float, state: GapState, estimate: Estimate, context: Context) -> float:
        if move <= 0:
            return move
        if not self._is_known(state, estimate, context) or abs(state.mean) < self.min_gap:
            return 0.0
        return move if state.mean > 0 else min(move, max(0.0, -context.shift))


@register
class KeepsGap(_Gap):
    """Lower only where the model does not overfit: less restraint fits better at once, and what it is for shows later.

    Both losses must be known, and on one scale (see `NeedsGap`).

    Args:
        max_gap: largest held-out loss - training loss, as a share of the held-out loss.
    """

    max_gap: float = Field(default=0.2, ge=0, le=1)

    def allow(self, move: float, state: GapState, estimate: Estimate, context: Context) -> float:
        if move >= 0:
            return move
        return move if self._is_known(state, estimate, context) and state.mean <= self.max_gap else 0.0
