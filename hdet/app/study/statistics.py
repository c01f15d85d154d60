"""What a study's numbers say: means, and differences paired by seed, tested and corrected.

A run that diverged has no number to put into a mean, and leaving it out flatters what made it diverge. So where a
pair of runs lacks a finite value on either side the difference of the others is shown, and nothing is tested.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hdet.errors import MissingExtraError

Levels = tuple[tuple[str, str], ...]
# By seed; not finite where the run diverged, None where there is no result yet.
Values = Mapping[int, float | None]

C = TypeVar("C", bound="PairedDifference")


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Two groups of runs, paired by seed.

    Attributes:
        pairs: seeds with a finite value on both sides; `diverged`, those with a value on each and one of them not
            finite; `seeds`, all there should be.
        difference: mean over the pairs; NaN without one.
        interval: half width of its confidence interval, not corrected for the number of comparisons.
        p: of a paired t-test that the difference is 0, two-sided; `adjusted` after Holm's correction over the
            family. NaN with fewer than two pairs, with a pair missing or diverged, and where the pairs differ by
            exactly the same amount, which no t-test can judge.
    """

    difference: float = math.nan
    interval: float = math.nan
    p: float = math.nan
    adjusted: float = math.nan
    pairs: int = 0
    diverged: int = 0
    seeds: int = 0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One combination of levels, for one metric.

    Attributes:
        levels: factor and level.
        seeds: declared; `count`, those with a finite value; `failed`, those that diverged. The rest is not finished.
        mean, stderr: over the finite ones; stderr is NaN with fewer than two.
        seconds: mean wall time of a run; NaN where it was not asked for.
        is_baseline: whether others are compared with it.
        versus: the comparison with the baseline; empty without one.
    """

    levels: Levels
    seeds: int
    count: int
    failed: int
    mean: float
    stderr: float
    seconds: float = math.nan
    is_baseline: bool = False
    versus: PairedDifference = field(default_factory=PairedDifference)


@dataclass(frozen=True, kw_only=True)
class NamedDifference(PairedDifference):
    """A comparison that the study names: `first` minus `second`, two levels of `factor`, within the other `levels`."""

    levels: Levels
    factor: str
    first: str
    second: str


def rows(
    groups: Mapping[Levels, Values],
    baseline: Mapping[str, str],
    level: float = 0.05,
    *,
    tested: bool = True,
    seconds: Mapping[Levels, float] | None = None,
) -> list[Row]:
    """A row for each combination of levels.

    Args:
        groups: by combination, the metric by seed.
        baseline: levels of some factors; each group is compared with the one that has these levels and is
            equal in all other factors.
        level: 1 - level is the confidence of an interval.
        tested: whether these comparisons are the family that is tested.
        seconds: by combination, the mean wall time of its runs.

    >>> groups = {(("a", "x"),): {0: 1.0, 1: 2.0, 2: 3.0}, (("a", "y"),): {0: 1.5, 1: 2.4, 2: 3.6}}
    >>> [row.versus.difference for row in rows(groups, {"a": "x"})][1].__round__(3)
    0.5
    """
    found = []
    for levels, values in groups.items():
        known = [value for value in values.values() if value is not None]
        finite = np.array([value for value in known if math.isfinite(value)])
        row = Row(
            levels=levels,
            seeds=len(values),
            count=len(finite),
            failed=len(known) - len(finite),
            mean=float(finite.mean()) if len(finite) else math.nan,
            stderr=float(finite.std(ddof=1) / math.sqrt(len(finite))) if len(finite) > 1 else math.nan,
            seconds=math.nan if seconds is None else seconds.get(levels, math.nan),
        )
        reference = tuple((factor, baseline.get(factor, own)) for factor, own in levels)
        if baseline and reference == levels:
            row = replace(row, is_baseline=True)
        elif baseline and reference in groups:
            row = replace(row, versus=_compared(values, groups[reference], level))
        found.append(row)
    if not tested:
        return [replace(row, versus=replace(row.versus, p=math.nan)) for row in found]
    compared = [row for row in found if row.versus.seeds]
    adjusted = iter(_adjusted([row.versus for row in compared]))
    return [replace(row, versus=next(adjusted)) if row.versus.seeds else row for row in found]


def contrasts(
    groups: Mapping[Levels, Values], pairs: Sequence[tuple[str, str, str]], level: float = 0.05
) -> list[NamedDifference]:
    """Each pair within every combination of the other factors; all of them together are one family.

    Args:
        groups: by combination, the metric by seed.
        pairs: a factor and two of its levels each.

    >>> groups = {(("a", "x"),): {0: 1.0, 1: 2.0, 2: 3.0}, (("a", "y"),): {0: 1.5, 1: 2.4, 2: 3.6}}
    >>> contrasts(groups, [("a", "x", "y")])[0].difference.__round__(3)
    -0.5
    """
    found = []
    for factor, first, second in pairs:
        for levels, values in groups.items():
            if (factor, first) not in levels:
                continue
            other = tuple((name, second if name == factor else own) for name, own in levels)
            rest = tuple(item for item in levels if item[0] != factor)
            compared = _compared(values, groups.get(other, {}), level)
            found.append(NamedDifference(**vars(compared), levels=rest, factor=factor, first=first, second=second))
    return _adjusted(found)


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


def _adjusted(family: Sequence[C]) -> list[C]:
    """With Holm's correction. A comparison that could not be tested counts in the family, as one with p = 1."""
    corrected = holm([1.0 if math.isnan(one.p) else one.p for one in family])
    return [
        one if math.isnan(one.p) else replace(one, adjusted=value) for one, value in zip(family, corrected, strict=True)
    ]


def _compared(values: Values, reference: Values, level: float) -> PairedDifference:
    seeds = values.keys() | reference.keys()
    pairs = [(values.get(seed), reference.get(seed)) for seed in sorted(seeds)]
    known = [(one, other) for one, other in pairs if one is not None and other is not None]
    differences = np.array([one - other for one, other in known])
    finite = differences[np.isfinite(differences)]
    found = PairedDifference(
        difference=float(finite.mean()) if len(finite) else math.nan,
        pairs=len(finite),
        diverged=len(known) - len(finite),
        seeds=len(seeds),
    )
    if len(finite) < max(2, len(seeds)):
        return found
    p, interval = _paired_t(finite, level)
    return replace(found, p=p, interval=interval)


def _paired_t(differences: NDArray[np.float64], level: float) -> tuple[float, float]:
    """Two-sided p of mean 0, and the half width of the mean's confidence interval; NaNs where it cannot be said."""
    try:
        from scipy import stats
    except ModuleNotFoundError:
        raise MissingExtraError("scipy", "study") from None
    if not differences.any():
        return 1.0, 0.0  # the same run twice
    if np.ptp(differences) <= 1e-12 * np.abs(differences).max():
        return math.nan, math.nan  # a rounded metric, or too few seeds: its scatter is not zero, but unknown
    test = stats.ttest_1samp(differences, 0.0)
    interval = test.confidence_interval(1.0 - level)
    return float(test.pvalue), float(interval.high - interval.low) / 2
