"""Least squares with an intercept, and standard errors that mean what they say."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hdet.controllers.estimators.estimator import FloatArray

# Relative size below which a singular value, or the variation of a column, is rounding error.
_NEGLIGIBLE = 1e-10

MANY = 4096
"""Replicas from which on the normal equations are solved where that is safe: in a tenth of the time."""

_SAFE = 1e-4
"""Ratio of the least to the largest eigenvalue above which normal equations lose four digits of sixteen at most."""


@dataclass(frozen=True)
class _Solution:
    """Of p columns of n rows that vary, their means taken away.

    Attributes:
        each: [p, J] coefficients of each sub-batch.
        residuals: [n, J] of the losses.
        variances: [p] of the coefficients, for losses of variance 1.
        rank: number of independent columns.
        identified: [p] columns that are told apart from the others.
    """

    each: FloatArray
    residuals: FloatArray
    variances: FloatArray
    rank: int
    identified: NDArray[np.bool_]


@dataclass(frozen=True)
class Fit:
    """Coefficients [P], their standard errors [P] (inf where unknowable), and which are identified [P].

    Attributes:
        by_sub_batch: [P, J] coefficients of each sub-batch; J is 0 where their scatter is not the whole error.
        freedoms: [P] the degrees of freedom of the standard errors; inf or NaN where nobody knows.
    """

    coefficients: FloatArray
    stderr: FloatArray
    identified: NDArray[np.bool_]
    by_sub_batch: FloatArray
    freedoms: FloatArray

    def slopes(self, k: int) -> tuple[float, ...]:
        """What `Estimate.slopes` is told of coefficient k."""
        return tuple(self.by_sub_batch[k].tolist())

    def freedom(self, k: int) -> float | None:
        """What `Estimate.freedom` is told of coefficient k: None where the slopes tell it, or nobody does."""
        found = float(self.freedoms[k])
        return found if math.isfinite(found) and not self.by_sub_batch.size else None


def varies(columns: FloatArray) -> NDArray[np.bool_]:
    """Which columns of [n, P] take more than one value, rounding aside."""
    if len(columns) == 0:
        return np.zeros(columns.shape[1], dtype=np.bool_)
    return _centred(columns)[1]


def _centred(columns: FloatArray) -> tuple[FloatArray, NDArray[np.bool_]]:
    """[P, n] the columns less their means, one after another in memory, and [P] which of them vary."""
    rows = columns.T.copy()
    threshold = _NEGLIGIBLE * _largest(rows)
    means = rows.mean(axis=1) if len(columns) >= MANY else columns.mean(axis=0)  # whose sums are in another order
    rows -= means[:, None]
    return rows, np.asarray(_largest(rows) > threshold)


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
      that the sub-batches account for; the degrees of freedom of the sum are by Welch and Satterthwaite.
    - J = 1: `s^2 (X'X)^+` with `s^2` the residual variance on `n - 1 - rank` degrees of freedom; with
      none left the error is infinite.

    Columns are scaled to unit variance first, so neither the minimum norm nor the rank depends on units.
    """
    n, batches = losses.shape
    count = columns.shape[1]
    unknown = np.full(count, np.inf)
    nothing = Fit(np.zeros(count), unknown, np.zeros(count, dtype=np.bool_), np.zeros((count, 0)), unknown)
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
    contrasts = losses - losses[0]  # first, so that equal losses leave 0 and not rounding, which would look certain
    contrasts = contrasts - contrasts.mean(axis=0)
    solution = _by_normal_equations(scaled, scale, contrasts) if n >= MANY else None
    solution = solution or _by_decomposition(scaled, scale, contrasts)
    each, residuals = solution.each, solution.residuals
    freedom = n - 1 - solution.rank
    of_batches, of_replicas = np.zeros(int(moving.sum())), np.zeros(int(moving.sum()))
    if batches > 1:
        of_batches = each.var(axis=1, ddof=1) / batches
    if batches == 1 or replica_noise:
        common = residuals.mean(axis=1)
        excess = np.inf
        if freedom > 0:
            excess = float(common @ common) / freedom
        if batches > 1 and freedom > 0:
            own = ((residuals - common[:, None]) ** 2).sum() / (freedom * (batches - 1))
            excess = max(excess - float(own) / batches, 0.0)
        of_replicas = excess * solution.variances
    variance = of_batches + of_replicas

    identified = np.zeros(count, dtype=np.bool_)
    identified[moving] = solution.identified
    coefficients = np.zeros(count)
    coefficients[moving] = each.mean(axis=1)
    stderr = np.full(count, np.inf)
    stderr[moving] = np.sqrt(variance)
    stderr[~identified] = np.inf
    by_sub_batch = np.zeros((count, batches if batches > 1 and not replica_noise else 0))
    if by_sub_batch.size:
        by_sub_batch[moving] = each
    freedoms = np.full(count, np.inf)
    with np.errstate(all="ignore"):
        freedoms[moving] = 1.0 / (
            (of_batches / variance) ** 2 / max(batches - 1, 1) + (of_replicas / variance) ** 2 / max(freedom, 1)
        )
    return Fit(coefficients, stderr, identified, by_sub_batch, freedoms)


def _by_decomposition(scaled: FloatArray, scale: FloatArray, contrasts: FloatArray) -> _Solution:
    """Of minimum norm where columns are aliased."""
    left, singular, right = np.linalg.svd(scaled, full_matrices=False)
    rank = int((singular > np.sqrt(len(scaled)) * _NEGLIGIBLE * singular[0]).sum())
    left, singular, right = left[:, :rank], singular[:rank], right[:rank]
    inverse = (right.T / singular) @ left.T
    inverse /= scale[:, None]
    each = inverse @ contrasts
    residuals = contrasts - left @ (left.T @ contrasts)
    variances = np.square(inverse, out=inverse).sum(axis=1)
    return _Solution(each, residuals, variances, rank, (right**2).sum(axis=0) > 1 - 1e-6)


def _by_normal_equations(scaled: FloatArray, scale: FloatArray, contrasts: FloatArray) -> _Solution | None:
    """None where columns are too nearly aliased for the squares of their singular values to tell."""
    values, vectors = np.linalg.eigh(scaled.T @ scaled)
    if not values[0] > _SAFE * values[-1]:
        return None
    inverse = (vectors / values) @ vectors.T
    found = inverse @ (scaled.T @ contrasts)
    each, variances = found / scale[:, None], np.diag(inverse) / scale**2
    return _Solution(each, contrasts - scaled @ found, variances, len(scale), np.ones(len(scale), dtype=np.bool_))
