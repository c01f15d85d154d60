"""A mean over seeds, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half the interval's width."""
        return (self.high - self.low) / 2


def over_seeds(values: Sequence[float]) -> Interval:
    """Mean with Student's t interval of 95 %; NaN bounds with fewer than two values.

    >>> over_seeds([1.0, 2.0, 3.0]).half.__round__(3)
    2.484
    """
    array = np.asarray(values, dtype=np.float64)
    mean = float(array.mean()) if len(array) else math.nan
    if len(array) < 2:
        return Interval(mean, math.nan, math.nan)
    half = float(stats.t.ppf(0.975, len(array) - 1)) * float(array.std(ddof=1)) / math.sqrt(len(array))
    return Interval(mean, mean - half, mean + half)
