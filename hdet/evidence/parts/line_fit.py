"""Slope and curvature from losses at points of a line, one fit a sub-batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator

from hdet.controllers import Estimate
from hdet.sub_batches import as_of_eight


def _distinct(points: tuple[float, ...]) -> tuple[float, ...]:
    if len(set(points)) < 2:
        raise ValueError(f"a slope needs at least 2 distinct points, got {points}")
    return points


Points = Annotated[tuple[float, ...], AfterValidator(_distinct)]
"""Where losses are read for a slope, in units of a width; two of them at least differ."""


PROVEN = 3.0
"""Standard errors of 8 sub-batches that a curvature has to be above 0 for `bottom_in_value`; of fewer the t that is as
unlikely. Chance goes beyond it once in a hundred windows."""


def along(offsets: Sequence[float], losses: NDArray[np.float64]) -> Estimate:
    """Fit y_j(x) = a_j + b_j x + c_j x^2 / 2 in each sub-batch j; the mean and standard error of b and c over j.

    The sub-batches are the same at all points, so what they have in common cancels in b and c.

    Args:
        offsets: P distinct points x, in coordinate units; at least 2 (3 for a curvature).
        losses: [P, J] probe losses there, J >= 2.

    >>> x = np.array([-1.0, 0.0, 1.0])
    >>> round(along(x, np.stack([2 + 3 * x, 5 + 3 * x], axis=1)).slope, 6)
    3.0
    """
    x = np.asarray(offsets, dtype=np.float64)
    # Differences, so that losses which are all the same give a slope of 0 and not rounding that all sub-batches share.
    with np.errstate(invalid="ignore"):  # a loss that is infinite at all points, which tells nothing
        coefficients = _inverse(tuple(x.tolist())) @ (losses - losses[0])
    if not np.isfinite(coefficients).all():
        return Estimate.nothing()
    return Estimate.of_sub_batches(*coefficients[1:])


def bottom_in_value(offsets: Sequence[float], losses: NDArray[np.float64]) -> float | None:
    """Where y(s) = a + p (s - 1) + q (s - 1)^2 / 2, with s = exp(x) the value itself, is lowest: log(1 - p / q).

    A parabola in x, as `along` fits it, has its bottom within reach of the points; what is quadratic in s is not bound
    to that.

    Args:
        offsets: P distinct points x, in coordinate units.
        losses: [P, J] probe losses there, J >= 2.

    Returns:
        In coordinate units; None with fewer than 3 points, without a bottom at s > 0, and where q is not `PROVEN`.

    >>> x = np.array([-0.3, 0.0, 0.3])
    >>> bottom = bottom_in_value(x, np.stack([(np.exp(x) - 50) ** 2, (np.exp(x) - 50) ** 2 * 1.01], axis=1))
    >>> round(math.exp(bottom), 6)
    50.0
    """
    fit = along(np.expm1(offsets).tolist(), losses)
    p, q, error = fit.slope, fit.curvature, fit.curvature_stderr
    if q is None or error is None or not q > max(p, 0.0):
        return None
    t = q / error if error > 0.0 else math.inf
    return math.log1p(-p / q) if as_of_eight(t, losses.shape[1] - 1) > PROVEN else None


@lru_cache(maxsize=64)
def _inverse(offsets: tuple[float, ...]) -> NDArray[np.float64]:
    """[2 or 3, P] from losses to coefficients; most lines are read at the same points in every window."""
    x = np.array(offsets)
    columns = [np.ones_like(x), x] + ([x**2 / 2] if len(x) > 2 else [])
    return np.asarray(np.linalg.pinv(np.stack(columns, axis=1)))
