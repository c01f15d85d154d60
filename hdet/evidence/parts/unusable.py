"""Whether a probe's losses can be used: they are finite, and at all points that are compared."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hdet.user_warning import warn

WINDOWS = 3
"""Windows on end: a point can be too far away once."""


class Unusable:
    """Looks at the losses of each window, and warns of those that tell nothing."""

    def __init__(self) -> None:
        self._window = -1
        self._partly = False  # whether some were finite at some points only in the window that was last looked at
        self._on_end = 0
        self.told = False  # whether evidence that learned nothing by them was told of, since any has learned again

    def look(self, window: int, losses: NDArray[np.float64], replicas: int) -> None:
        """Look at losses [P, J] that are the same on every process; point p is replica p % replicas' to evaluate."""
        finite = np.isfinite(losses)
        look_everywhere(losses)
        self.told = self.told or not finite.any(axis=0).all()
        if window != self._window:
            self._on_end = self._on_end if self._partly else 0
            self._window, self._partly = window, False
        partly = ~finite & finite.any(axis=0)
        if not partly.any() or self._partly:
            return
        self._partly = True
        self._on_end += 1
        if self._on_end == WINDOWS:
            points, batches = (sorted(set(found.tolist())) for found in np.nonzero(partly))
            whose = sorted({point % replicas for point in points})
            warn(
                f"in {WINDOWS} windows on end the probe's loss was not finite on sub-batches {batches} of "
                f"{losses.shape[1]} at some of the weights that it was evaluated at, now where replicas {whose} of "
                f"{replicas} evaluate it, and finite at others, so that knobs judged there do not move: look at these "
                f"batches on all ranks, and at whether the loss overflows near the weights that are trained"
            )

    def look_along(self, window: int, losses: Tensor, evidence: str) -> None:
        """Look at the losses [J] of whose gradient a kind of evidence learned nothing. Waits for the device."""
        lost = np.flatnonzero(~np.isfinite(losses.double().cpu().numpy())).tolist()
        if lost and not self.told:
            warn(
                f"in window {window} the probe's loss was not finite on {len(lost)} of {len(losses)} sub-batches "
                f"(first {lost[:4]}) where {evidence} took its gradient, so that it learned nothing in that window, "
                f"and the knobs it judges stay where they are: look at these batches (an empty mask, a label that is "
                f"missing) and at the loss (said once, and anew where it comes back)"
            )
        self.told = bool(lost)


def look_everywhere(losses: NDArray[np.float64]) -> None:
    """Warn of sub-batches that tell nothing at any of the points, of losses [P, J]."""
    never = np.flatnonzero(~np.isfinite(losses).any(axis=0)).tolist()
    if never:
        warn(
            f"the probe's loss is not finite on sub-batches {never} of {losses.shape[1]}, at any weights that "
            f"it was evaluated at, so that nothing is learnt from any, and every knob stays where it is (a rate "
            f"that is entered from below for caution too): look at these batches (an empty mask, a label that is "
            f"missing) and at the loss"
        )
