"""What a study's numbers say: means, and differences from a baseline, paired by seed and corrected."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hdet.errors import MissingExtraError

Levels = tuple[tuple[str, str], ...]
Values = Mapping[int, float]


@dataclass(frozen=True)
class Row:
    """One combination of levels, for one metric.

    Attributes:
        levels: factor and level.
        count: seeds with a finite value; `failed`, those that diverged.
        mean, stderr: over the finite ones; stderr is NaN with fewer than two.
        difference: mean of value - baseline's value over the seeds both have; NaN without a baseline.
        interval: half width of its confidence interval (of the study's level, not corrected).
        p: of a paired t-test that the difference is 0, two-sided; `adjusted` after Holm's correction over all
        rows.
        pairs: seeds in the comparison.
        is_baseline: whether others are compared with it.
    """

    levels: Levels
    count: int
    failed: int
    mean: float
    stderr: float
    difference: float = math.nan
    interval: float = math.nan
    p: float = math.nan
    adjusted: float = math.nan
    pairs: int = 0
    is_baseline: bool = False


def rows(groups: Mapping[Levels, Values], baseline: Mapping[str, str], level: float = 0.05) -> list[Row]:
    """A row for each combination of levels.

    Args:
        groups: by combination, the metric by seed; not finite where the run failed.
        baseline: levels of some factors; each group is compared with the one that has these levels and is
            equal in all other factors.
        level: of significance.

    >>> groups = {(("a", "x"),): {0: 1.0, 1: 2.0, 2: 3.0}, (("a", "y"),): {0: 1.5, 1: 2.4, 2: 3.6}}
    >>> [row.difference for row in rows(groups, {"a": "x"})][1].__round__(3)
    0.5
    """
    found = []
    for levels, values in groups.items():
        finite = np.array([value for value in values.values() if math.isfinite(value)])
        row = Row(
            levels=levels,
            count=len(finite),
            failed=len(values) - len(finite),
            mean=float(finite.mean()) if len(finite) else math.nan,
            stderr=float(finite.std(ddof=1) / math.sqrt(len(finite))) if len(finite) > 1 else math.nan,
        )
        reference = tuple((factor, baseline.get(factor, own)) for factor, own in levels)
        if baseline and reference == levels:
            row = replace(row, is_baseline=True)
        elif baseline and reference in groups:
            row = _compared(row, values, groups[reference], level)
        found.append(row)
    adjusted = holm([row.p for row in found])
    return [replace(row, adjusted=value) for row, value in zip(found, adjusted, strict=True)]


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment of p-values (Holm 1979); NaNs are no tests and stay.

    >>> holm([0.01, 0.04, 0.03, float("nan")])
    [0.03, 0.06, 0.06, nan]
    """
    adjusted = [math.nan] * len(p)
    order = sorted((index for index, value in enumerate(p) if not math.isnan(value)), key=lambda index: p[index])
    highest = 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * p[index]))
        adjusted[index] = highest
    return adjusted


def _compared(row: Row, values: Values, reference: Values, level: float) -> Row:
    seeds = [
        seed for seed in values if seed in reference and math.isfinite(values[seed]) and math.isfinite(reference[seed])
    ]
    if not seeds:
        return row
    differences = np.array([values[seed] - reference[seed] for seed in seeds])
    difference = float(differences.mean())
    if len(seeds) < 2:
        return replace(row, difference=difference, pairs=1)
    p, interval = _paired_t(differences, level)
    return replace(row, difference=difference, interval=interval, p=p, pairs=len(seeds))


def _paired_t(differences: NDArray[np.float64], level: float) -> tuple[float, float]:
    """Two-sided p of mean 0, and the half width of the mean's confidence interval."""
    try:
        from scipy import stats
    except ModuleNotFoundError:
        raise MissingExtraError("scipy", "study") from None
    if np.ptp(differences) <= 1e-12 * np.abs(differences).max():
        # No scatter at all: the same run twice, or two runs that differ by a constant.
        return (1.0, 0.0) if differences[0] == 0.0 else (0.0, 0.0)
    test = stats.ttest_1samp(differences, 0.0)
    interval = test.confidence_interval(1.0 - level)
    return float(test.pvalue), float(interval.high - interval.low) / 2
