"""All knobs at once."""

from __future__ import annotations

import numpy as np

from hdet.controllers.estimate import Estimate
from hdet.controllers.estimators.estimator import Comparison, Estimator, FloatArray
from hdet.controllers.estimators.regression import Fit, regress, varies
from hdet.controllers.state import NoState
from hdet.spec import register


@register
class LeastSquares(Estimator):
    """Joint regression of the losses on all knobs' levels, with curvature where the levels can tell it.

    `L_r = a + sum_k b_k z_rk (+ sum_k c_k z_rk^2 / 2)`; the slope at the base is `b_k`. One knob's effect
    does not blur another's.

    Standard errors come from the spread of the fits over sub-batches when the losses are [N, J], else from
    residuals with N - K - 1 degrees of freedom. Where K + 1 > N (or two knobs were given the same column) the
    slopes are those of minimum norm, and the error of every knob that cannot be told apart is infinite; to
    gather such evidence over windows use `hdet.contrib.Kalman`.

    Args:
        curvature: fit c_k too, for every knob with three levels or more, if enough replicas were heard to do
            so for all of them; else a window's fit is linear and its curvatures are None.
        replica_noise: add the scatter of replicas about the fit to sub-batch errors; set it where replicas
            take their own gradients and so differ by more than their levels.

    >>> x = np.array([[-1.0], [-0.4], [0.4], [1.0]])
    >>> truth = 2 + 0.5 * x[:, 0] + 3 * x[:, 0] ** 2 / 2
    >>> comparison = Comparison(levels=x, losses=truth, shifts=np.zeros(1), valid=np.ones(4))
    >>> (estimate,), _ = LeastSquares(curvature=True).estimate(NoState(), comparison)
    >>> round(estimate.slope, 6), round(estimate.curvature, 6)
    (0.5, 3.0)
    """

    curvature: bool = False
    replica_noise: bool = False

    def start(self, knobs: int) -> NoState:
        return NoState()

    def estimate(self, state: NoState, comparison: Comparison) -> tuple[list[Estimate], NoState]:
        levels, losses = comparison.heard()
        with np.errstate(all="ignore"):
            fit, curved = self._fit(levels, losses)
        estimates = []
        for k in range(comparison.knobs):
            slope, stderr = float(fit.coefficients[k]), float(fit.stderr[k])
            if not np.isfinite(slope) or np.isnan(stderr):
                estimates.append(Estimate.nothing())
                continue
            curvature = curvature_stderr = None
            if k in curved:
                at = comparison.knobs + curved.index(k)
                curvature, curvature_stderr = float(fit.coefficients[at]), float(fit.stderr[at])
            estimates.append(
                Estimate(slope, curvature, stderr, curvature_stderr, slopes=fit.slopes(k), freedom=fit.freedom(k))
            )
        return estimates, state

    def _fit(self, levels: FloatArray, losses: FloatArray) -> tuple[Fit, list[int]]:
        """The fit, and the knobs whose curvature is among its coefficients, after the K slopes."""
        if not self.curvature:
            return regress(levels, losses, replica_noise=self.replica_noise), []
        squares = levels**2 / 2
        finite = np.isfinite(squares).all(axis=0)
        curved = [int(k) for k in np.flatnonzero(varies(squares) & finite)]
        needed = int(varies(levels).sum()) + len(curved) + (losses.shape[1] == 1 or self.replica_noise)
        if curved and needed <= len(levels) - 1:
            fit = regress(np.hstack([levels, squares[:, curved]]), losses, replica_noise=self.replica_noise)
            if fit.identified[levels.shape[1] :].all():
                return fit, curved
        return regress(levels, losses, replica_noise=self.replica_noise), []
