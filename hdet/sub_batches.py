"""Evidence that adds up over windows, kept apart by sub-batch: errors that repeat are not averaged away."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

EIGHT = 7
"""Degrees of freedom of eight sub-batches, with which the thresholds of the rules were chosen."""
BEYOND = 1e10
"""No threshold for t lies as high, and its square does not overflow."""


def normal_equivalent(t: float, freedom: float) -> float:
    """The normal deviate as unlikely as a Student t on `freedom` degrees of freedom, to 1 % from 5 degrees on.

    `z = sign(t) sqrt(f log(1 + t^2 / f)) (8 f + 1) / (8 f + 3)` (Wallace 1959, Bounds on normal approximations to
    Student's and the chi-square distributions, Ann. Math. Statist. 30). So a gate of 2 means the same surprise whether
    the standard error comes from many numbers or, as from 8 sub-batches, from few.

    >>> round(normal_equivalent(2.365, freedom=7), 2)
    1.96
    """
    if not math.isfinite(t) or math.isinf(freedom):
        return t
    # The square of a large t overflows; its logarithm does not.
    surprise = math.log1p(t * t / freedom) if abs(t) < 1e100 else 2.0 * math.log(abs(t)) - math.log(freedom)
    deviate = math.sqrt(freedom * surprise) if abs(t) > 1e-150 else abs(t)  # the square of a small t vanishes
    return math.copysign(deviate * (8 * freedom + 1) / (8 * freedom + 3), t)


def as_of_eight(t: float, freedom: float) -> float:
    """The Student t that would be as unlikely with eight sub-batches; from eight on, `t` itself.

    By `normal_equivalent` and back. With two sub-batches |t| is above 2 in 30 % of windows that teach nothing, with
    eight in 9 %.

    >>> round(as_of_eight(4.303, freedom=2), 2)
    2.32
    """
    if freedom >= EIGHT or not math.isfinite(t):
        return t
    z = normal_equivalent(min(abs(t), BEYOND), freedom) * (8 * EIGHT + 3) / (8 * EIGHT + 1)
    return math.copysign(math.sqrt(EIGHT * math.expm1(z * z / EIGHT)), t)


def accumulated(sums: Sequence[float], slopes: Sequence[float], kept: float) -> tuple[float, ...]:
    """`Z_j <- kept Z_j + b_j`; begun anew where the number of sub-batches changes, or a sum overflows."""
    if len(sums) != len(slopes):
        return tuple(slopes)
    totals = tuple(kept * total + slope for total, slope in zip(sums, slopes, strict=True))
    return totals if all(map(math.isfinite, totals)) else tuple(slopes)


def scatter_t(sums: Sequence[float]) -> float:
    """The mean of J numbers over the standard error that their scatter tells: t on J - 1 degrees of freedom.

    0 for fewer than two, and infinite where they are all the same.

    >>> round(scatter_t([1.0, 2.0, 3.0, 2.0]), 2)
    4.9
    """
    values = np.asarray(sums, dtype=np.float64)
    largest = float(np.abs(values).max(initial=0.0))
    if len(values) < 2 or largest == 0.0 or not math.isfinite(largest):
        return 0.0
    values = values / largest  # squares of very large or small numbers would overflow or vanish
    mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values))
    if mean == 0.0:
        return 0.0
    return mean / error if error > 0.0 else math.copysign(math.inf, mean)


def student(sums: Sequence[float]) -> float:
    """`scatter_t` of J numbers as its normal equivalent.

    Windows on one fixed probe err alike, and windows on fresh ones do not. The scatter over j of sums that were kept
    apart by sub-batch shows which it was; adding up the windows' variances would have to assume it.

    >>> round(student([1.0, 2.0, 3.0, 2.0]), 2)
    2.38
    """
    return normal_equivalent(scatter_t(sums), len(sums) - 1)
