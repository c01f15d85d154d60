"""The laws of spreads."""

from __future__ import annotations

import numpy as np

from hdet.hparams import Spread
from hdet.testing.law import refused, require

SIZES = (2, 3, 4, 5, 7, 8, 16, 33)
EXPLORING = 0.01
"""The width of one that was declared without; bounds of a width leave it room."""
ROUNDING = 1e-12
"""Of a level; levels that were centred by subtracting their mean are off by what rounding left of that."""


def _exploring(spread: Spread) -> Spread:
    return spread if spread.width > 0 else spread.replace(width=EXPLORING)


def levels_sum_to_zero(spread: Spread) -> None:
    """The N levels are finite and sum to zero up to rounding, for every N."""
    spread = _exploring(spread)
    for n in SIZES:
        levels = spread.levels(n)
        require(levels.shape == (n,) and levels.dtype == np.float64, f"levels({n}) is {levels!r}")
        require(np.isfinite(levels).all(), f"levels({n}) is {levels.tolist()}")
        total, slack = abs(float(levels.sum())), n * ROUNDING * float(np.abs(levels).max())
        require(total <= slack, f"levels({n}) is {levels.tolist()}, whose sum is {float(levels.sum())!r}")


def levels_ascend(spread: Spread) -> None:
    """Levels ascend, and are not all the same while there is a width."""
    spread = _exploring(spread)
    for n in SIZES:
        levels = spread.levels(n)
        require((np.diff(levels) >= 0).all(), f"levels({n}) is {levels.tolist()}")
        require(levels[-1] > levels[0], f"levels({n}) is {levels.tolist()} at width {spread.width}")


def two_levels_are_two(spread: Spread) -> None:
    """With `two_level`, half of an even number of replicas share one level and half another."""
    spread = _exploring(spread)
    for n in [n for n in SIZES if n % 2 == 0] if spread.two_level else []:
        levels = spread.levels(n)
        halves = (levels[: n // 2], levels[n // 2 :])
        require(all(np.ptp(half) == 0 for half in halves), f"levels({n}) is {levels.tolist()}")


def width_zero_explores_nothing(spread: Spread) -> None:
    """At width 0 all levels and the centre are exactly 0, for one replica too."""
    still = spread.replace(width=0.0)
    for n in (1, *SIZES):
        levels, centre = still.levels(n), still.centre(n)
        require(not levels.any() and levels.shape == (n,), f"levels({n}) at width 0 is {levels.tolist()}")
        require(centre == 0.0, f"centre({n}) at width 0 is {centre!r}")


def one_replica_is_refused(spread: Spread) -> None:
    """One replica with a width, and no replica at all, are each a ConfigError."""
    refused(lambda: _exploring(spread).levels(1), "levels(1)")
    refused(lambda: _exploring(spread).levels(0), "levels(0)")


def levels_are_pure(spread: Spread) -> None:
    """The same levels at each call, whatever was done to the last ones."""
    spread = _exploring(spread)
    for n in SIZES:
        first = spread.levels(n)
        kept = first.tolist()
        first[:] = 99.0
        again = spread.levels(n).tolist()
        require(again == kept, f"levels({n}) was {kept} and is {again}")


def a_wider_spread_is_the_same_spread_scaled(spread: Spread) -> None:
    """Half the width gives half the levels and half the centre."""
    two = _exploring(spread)
    one = two.replace(width=0.5 * two.width)
    for n in SIZES:
        near = np.allclose(two.levels(n), 2 * one.levels(n), rtol=1e-9, atol=1e-12 * one.width)
        require(near, f"levels({n}) is {two.levels(n).tolist()}, and {one.levels(n).tolist()} at half the width")
        require(abs(two.centre(n) - 2 * one.centre(n)) <= 1e-9 * one.width, f"centre({n}) does not scale")
