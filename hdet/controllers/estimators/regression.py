"""Least squares with an intercept, and standard errors that mean what they say."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hdet.controllers.estimators.estimator import FloatArray

# Relative size below which a singular value, or the variation of a column, is rounding error.
_NEGLIGIBLE = 1e-10


@dataclass(frozen=True)
class Fit:
    """Coefficients [P], their standard errors [P] (inf where unknowable), and which are identified [P].

    Attributes:
        by_sub_batch: [P, J] coefficients of each sub-batch; J is 0 where their scatter is not the whole error.
    """

    coefficients: FloatArray
    stderr: FloatArray
    identified: NDArray[np.bool_]
    by_sub_batch: FloatArray

    def slopes(self, k: int) -> tuple[float, ...]:
        """What `Estimate.slopes` is told of coefficient k."""
        return tuple(self.by_sub_batch[k].tolist())


def varies(columns: FloatArray) -> NDArray[np.bool_]:
    """Which columns of [n, P] take more than one value, rounding aside."""
    if len(columns) == 0:
        return np.zeros(columns.shape[1], dtype=np.bool_)
    return _centred(columns)[1]


def _centred(columns: FloatArray) -> tuple[FloatArray, NDArray[np.bool_]]:
    """[P, n] the columns less their means, one after another in memory, and [P] which of them vary."""
    rows = np.ascontiguousarray(columns.T)
    centred = rows - columns.mean(axis=0)[:, None]
    return centred, np.asarray(_largest(centred) > _NEGLIGIBLE * _largest(rows))


def _largest(rows: FloatArray) -> FloatArray:
    """[P] The largest absolute value of each of [P, n]."""
    largest: FloatArray = np.maximum(rows.max(axis=1), -rows.min(axis=1))
    return largest


def regress(columns: FloatArray, losses: FloatArray, *, replica_noise: bool = False) -> Fit:
    r"""Regress losses [n, J] on columns [n, P] and an intercept; minimum norm where columns are aliased.

    Each sub-batch j is fitted by itself, `beta_j = X^+ L_j`, and `beta = mean_j beta_j`. Its variance is

    - J > 1: `var_j(beta_j) / J`. Sub-batches are paired over replicas, so what they disagree about is the
      error of the comparison; residuals would not do, for replicas that share gradients lie on a line and
      leave none. With `replica_noise` the scatter of replicas about the fit is added, less the part of it
      that the sub-batches account for.
    - J = 1: `s^2 (X'X)^+` with `s^2` the residual variance on `n - 1 - rank` degrees of freedom; with
      none left the error is infinite.

    Columns are scaled to unit variance first, so neither the minimum norm nor the rank depends on units.
    """
    n, batches = losses.shape
    count = columns.shape[1]
    nothing = Fit(np.zeros(count), np.full(count, np.inf), np.zeros(count, dtype=np.bool_), np.zeros((count, 0)))
    if n < 2:
        return nothing
    centred, moving = _centred(columns)
    if not moving.any():
        return nothing
    # Of thousands of replicas new memory takes longer than arithmetic, so that there is little of it.
    centred = centred.T if moving.all() else centred[moving].T  # column by column in memory
    largest = _largest(centred.T)
    scaled = centred / largest
    scale = largest * np.sqrt(np.square(scaled, out=scaled).mean(axis=0))  # levels of 1e154 and more have no square
    np.divide(centred, scale, out=scaled)
    if not np.isfinite(scaled).all():
        return nothing
    left, singular, right = np.linalg.svd(scaled, full_matrices=False)
    rank = int((singular > np.sqrt(n) * _NEGLIGIBLE * singular[0]).sum())
    left, singular, right = left[:, :rank], singular[:rank], right[:rank]
    inverse = (right.T / singular) @ left.T
    inverse /= scale[:, None]

    contrasts = losses - losses[0]  # first, so that equal losses leave 0 and not rounding, which would look certain
    contrasts = contrasts - contrasts.mean(axis=0)
    each = inverse @ contrasts
    residuals = contrasts - left @ (left.T @ contrasts)
    freedom = n - 1 - rank
    variance = np.zeros(int(moving.sum()))
    if batches > 1:
        variance += each.var(axis=1, ddof=1) / batches
    if batches == 1 or replica_noise:
        common = residuals.mean(axis=1)
        excess = np.inf
        if freedom > 0:
            excess = float(common @ common) / freedom
        if batches > 1 and freedom > 0:
            own = ((residuals - common[:, None]) ** 2).sum() / (freedom * (batches - 1))
            excess = max(excess - float(own) / batches, 0.0)
        variance += excess * np.square(inverse, out=inverse).sum(axis=1)

    identified = np.zeros(count, dtype=np.bool_)
    identified[moving] = (right**2).sum(axis=0) > 1 - 1e-6
    coefficients = np.zeros(count)
    coefficients[moving] = each.mean(axis=1)
    stderr = np.full(count, np.inf)
    stderr[moving] = np.sqrt(variance)
    stderr[~identified] = np.inf
    by_sub_batch = np.zeros((count, batches if batches > 1 and not replica_noise else 0))
    if by_sub_batch.size:
        by_sub_batch[moving] = each
    return Fit(coefficients, stderr, identified, by_sub_batch)
