"""One knob at a time: the simplest estimator."""

from __future__ import annotations

import numpy as np

from hdet.controllers.estimate import Estimate
from hdet.controllers.estimators.estimator import Comparison, Estimator
from hdet.controllers.estimators.regression import regress
from hdet.controllers.state import NoState
from hdet.spec import register


@register
class Marginal(Estimator):
    """Regress the losses on each knob's levels alone, whatever the other knobs did.

    `slope_k = sum_r (z_rk - mean z_k) (L_r - mean L) / sum_r (z_rk - mean z_k)^2`. The effects of other knobs
    end up in its error; `LeastSquares` removes them. Errors as in `LeastSquares`.

    Args:
        replica_noise: add the scatter of replicas about the fit to sub-batch errors; set it where replicas
            take their own gradients and so differ by more than their levels.

    >>> levels, losses = np.array([[-0.5], [0.5]]), np.array([2.0, 1.0])
    >>> comparison = Comparison(levels, losses, shifts=np.zeros(1), valid=np.ones(2))
    >>> estimates, _ = Marginal().estimate(NoState(), comparison)
    >>> round(estimates[0].slope, 6), estimates[0].stderr
    (-1.0, inf)
    """

    replica_noise: bool = False

    def start(self, knobs: int) -> NoState:
        return NoState()

    def estimate(self, state: NoState, comparison: Comparison) -> tuple[list[Estimate], NoState]:
        levels, losses = comparison.heard()
        estimates = []
        with np.errstate(all="ignore"):
            for k in range(comparison.knobs):
                fit = regress(levels[:, k : k + 1], losses, replica_noise=self.replica_noise)
                slope, stderr = float(fit.coefficients[0]), float(fit.stderr[0])
                usable = np.isfinite(slope) and not np.isnan(stderr)
                told = Estimate(slope=slope, stderr=stderr, slopes=fit.slopes(0), freedom=fit.freedom(0))
                estimates.append(told if usable else Estimate.nothing())
        return estimates, state
