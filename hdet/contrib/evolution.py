"""The estimate of evolution strategies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hdet.contrib.marginal import Marginal
from hdet.controllers.estimate import Estimate
from hdet.controllers.estimators.estimator import Comparison, Estimator, FloatArray
from hdet.controllers.state import NoState
from hdet.spec import register


@register
class EvolutionStrategy(Estimator):
    """`slope_k = sum_r z_rk F_r / sum_r z_rk^2`, with F the centred ranks of the losses.

    Salimans et al. 2017, arXiv 1703.03864: with perturbations z = width epsilon it is their
    `1 / (N sigma) sum_r F_r epsilon_r`, in units of the coordinate, and normalised by the mean square that the window
    has. Ranks run from -1/2 to 1/2; the slope is a change of rank for a coordinate, which no outlier and no scale of
    the loss can move. Without `ranks` it is `Marginal`, whatever the spread: the estimate of a two-level design is
    that of evolution strategies with signs for perturbations.

    Made for `Gaussian` levels in an `Antithetic` design, and a controller that is an optimizer (`Adam`, or
    `hdet.controllers.HeavyBall`, which is SGD).

    Args:
        ranks: shape the losses so; else take them as they are.

    >>> levels, losses = np.array([[-1.0], [-0.5], [0.5], [1.0]]), np.array([2.0, 1.0, 0.5, 0.0])
    >>> comparison = Comparison(levels, losses, shifts=np.zeros(1), valid=np.ones(4))
    >>> (estimate,), _ = EvolutionStrategy().estimate(NoState(), comparison)
    >>> round(estimate.slope, 6)
    -0.466667
    """

    ranks: bool = True

    def start(self, knobs: int) -> NoState:
        return NoState()

    def estimate(self, state: NoState, comparison: Comparison) -> tuple[list[Estimate], NoState]:
        losses = comparison.losses.reshape(len(comparison.losses), -1).mean(axis=1)
        heard = comparison.valid & np.isfinite(losses) & np.isfinite(comparison.levels).all(axis=1)
        shaped = np.full(len(losses), np.nan)
        shaped[heard] = centred_ranks(losses[heard]) if self.ranks else losses[heard]
        return Marginal().estimate(state, replace(comparison, losses=shaped))


def centred_ranks(losses: FloatArray) -> FloatArray:
    """[n] ranks from -1/2 for the lowest loss to 1/2 for the highest; losses that tie share the mean of theirs.

    >>> centred_ranks(np.array([3.0, 1.0, 3.0])).tolist()
    [0.25, -0.5, 0.25]
    """
    below = (losses[:, None] > losses).sum(axis=1)
    alike = (losses[:, None] == losses).sum(axis=1)
    ranks: FloatArray = (below + (alike - 1) / 2) / max(1, len(losses) - 1) - 0.5
    return ranks
