"""A mean weighted by the signal: better replicas count more."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hdet.evidence.parts.replica_losses import ReplicaLosses
from hdet.evidence.scene import Harvest, Scene
from hdet.merging.merge import Averager, Merge, OptimizerState, part_of
from hdet.spec import register


@register
class Weighted(Merge):
    """theta <- sum_r w_r theta_r, where a replica with a lower signal weighs more.

        w_r = exp(-(L_r - min L) / (temperature sd(L))) / sum_s ...

    L_r is replica r's signal over the window: its mean training loss, or the probe's loss at its weights. sd is the
    standard deviation over the replicas that take part, so that one temperature serves all losses. A replica that is
    not valid, or whose signal is not finite, weighs nothing. Where no signal tells replicas apart they weigh alike.

    For replicas that can be much worse than others for long: one with bad data, or a bad value. Where they differ by
    noise it throws samples away, and the mean is better.

    With `Weighted(0)` the best replica is taken whole (and replicas that tie share). With `temperature=None` and
    `trim` it is a trimmed mean.

    Args:
        temperature: in standard deviations of the signal; 0 takes the best alone, None weighs alike all that are left.
        trim: share of the replicas that is left out first, the worst ones.
        optimizer: as of `Mean`; what is averaged is weighted in the same way.

    >>> import hdet
    >>> hdet.merges.Merge.from_dict({"kind": "weighted", "temperature": 0}) == hdet.contrib.Weighted(0.0)
    True
    """

    temperature: float | None = Field(default=1.0, ge=0, kw_only=False)
    trim: float = Field(default=0.0, ge=0, lt=1)
    optimizer: OptimizerState = "average"

    def at_work(self, scene: Scene) -> BySignal:
        return BySignal(self, scene)


class BySignal(Averager):
    """Weighs replicas by their signal over the window."""

    def __init__(self, spec: Weighted, scene: Scene) -> None:
        super().__init__(scene, spec.optimizer)
        self.spec = spec
        self._losses = ReplicaLosses(scene)

    def weights(self, harvest: Harvest) -> NDArray[np.float64] | None:
        losses = self._losses.measure(harvest).reshape(len(harvest.valid), -1).mean(axis=1)
        losses = np.where(harvest.valid, losses, np.nan)
        return by_signal(losses, self.spec.temperature, self.spec.trim)


def by_signal(losses: NDArray[np.float64], temperature: float | None, trim: float = 0.0) -> NDArray[np.float64] | None:
    """[N] weights that sum to 1, in any order of the replicas the same; None where no loss is finite.

    Args:
        losses: [N]; one that is not finite weighs nothing.

    >>> by_signal(np.array([1.0, 3.0, np.nan, 2.0]), temperature=0.0)
    array([1., 0., 0., 0.])
    >>> by_signal(np.array([1.0, 3.0, 9.0, 2.0]), temperature=None, trim=0.25).round(2)
    array([0.33, 0.33, 0.  , 0.33])
    """
    finite = np.isfinite(losses)
    if not finite.any():
        return None
    ranked = np.sort(losses[finite])
    last = ranked[max(0, len(ranked) - 1 - part_of(trim, len(ranked)))]
    taking = finite & (np.where(finite, losses, np.inf) <= last)  # replicas that tie with the last one stay in
    behind = np.where(taking, losses - ranked[0], 0.0)
    if temperature == 0.0:
        raw = taking & (behind == 0.0)
    elif temperature is None or not (scale := temperature * losses[taking].std()):
        raw = taking
    else:
        with np.errstate(over="ignore"):
            raw = taking * np.exp(-behind / scale)
    weights: NDArray[np.float64] = raw / raw.sum()
    return weights
