"""The paper's estimate: where the better replicas stand."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from hdet.controllers.estimate import Estimate
from hdet.controllers.estimators.estimator import Comparison, Estimator
from hdet.controllers.estimators.regression import varies
from hdet.controllers.state import NoState
from hdet.spec import register


@register
class Softmax(Estimator):
    """The displacement of the softmax-weighted mean level, negated so that it has the sign of a slope.

    `w_r = softmax_r((mean L - L_r) / sigma)`, `slope_k = -(sum_r w_r z_rk - mean_r z_rk)`
    (Cheng, Huang, Zhu and Alonso 2026, arXiv:2604.24708). It is a length in coordinates, not a loss per
    coordinate: for the paper's spread of width a it is `(a^2 c_N / sigma) dL/dz` to first order, with
    `c_N = (N + 1) / (3 (N - 1))`, and it never exceeds the spread.

    The standard error is the delta method's, `d slope / d L_r = w_r (z_r - sum w z) / sigma`: over paired
    sub-batches when the losses are [N, J], else with the variance of the losses themselves (which supposes
    that no knob matters, and so is too wide when one does).

    Args:
        sigma: temperature in units of the loss. The paper's text says 0.1.

    >>> levels, losses = np.array([[-1.0], [1.0]]), np.array([1.1, 1.0])
    >>> comparison = Comparison(levels, losses, shifts=np.zeros(1), valid=np.ones(2))
    >>> estimates, _ = Softmax(sigma=0.1).estimate(NoState(), comparison)
    >>> round(estimates[0].slope, 4)                    # -tanh(1/2)
    -0.4621
    """

    sigma: float = Field(default=0.1, gt=0, kw_only=False)

    def start(self, knobs: int) -> NoState:
        return NoState()

    def estimate(self, state: NoState, comparison: Comparison) -> tuple[list[Estimate], NoState]:
        levels, losses = comparison.heard()
        if len(levels) < 2:
            return [Estimate.nothing()] * comparison.knobs, state
        batches = losses.shape[1]
        moving = varies(levels)
        levels = levels - levels.mean(axis=0)
        with np.errstate(over="ignore", invalid="ignore"):
            contrasts = losses - losses.min(axis=0)
            means = contrasts.mean(axis=1)
            weights = np.exp((means.min() - means) / self.sigma)
            weights /= weights.sum()
            centre = (weights - 1 / len(weights)) @ levels  # exactly 0 for equal losses, as is its error
            gradient = weights[:, None] * (levels - centre) / self.sigma
            if batches > 1:
                stderr = (gradient.T @ contrasts).std(axis=1, ddof=1) / np.sqrt(batches)
            else:
                stderr = means.std(ddof=1) * np.sqrt((gradient**2).sum(axis=0))
        usable = moving & np.isfinite(centre)
        centre = np.where(usable, centre, 0.0)
        stderr = np.where(usable & np.isfinite(stderr), stderr, np.inf)
        pairs = zip((0.0 - centre).tolist(), stderr.tolist(), strict=True)
        return [Estimate(slope=slope, stderr=error) for slope, error in pairs], state
