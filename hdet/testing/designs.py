"""The laws of designs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hdet.errors import ConfigError
from hdet.hparams import Design, Spread, Symmetric, TwoLevel
from hdet.testing.law import refused, require

SIZES = (2, 3, 4, 5, 8, 12, 16)
KNOBS = (1, 2, 4, 9)
WINDOWS = range(5)
SPREADS: tuple[tuple[Spread, ...], ...] = ((TwoLevel(0.5),), (Symmetric(0.3), TwoLevel(0.1)))

Levels = list[NDArray[np.float64]]


def _cases(design: Design) -> Iterator[tuple[Levels, dict[str, Any]]]:
    """Arguments that the design accepts; it may refuse some, by a ConfigError, but not all."""
    accepted = 0
    for n in SIZES:
        for knobs in KNOBS:
            for spreads in SPREADS:
                chosen = [spreads[k % len(spreads)] for k in range(knobs)]
                levels = [spread.levels(n) for spread in chosen]
                given: dict[str, Any] = {
                    "seed": 3,
                    "names": [f"knob {k}" for k in range(knobs)],
                    "two_level": [spread.two_level for spread in chosen],
                }
                try:
                    design.assign(levels, window=0, **given)
                except ConfigError:
                    continue
                accepted += 1
                yield levels, given
    require(accepted > 0, f"it refuses every one of {SIZES} replicas and {KNOBS} knobs")


def columns_are_permutations_of_the_levels(design: Design) -> None:
    """Column k hands out exactly the levels of knob k, each as often as it is there."""
    for levels, given in _cases(design):
        for window in WINDOWS:
            matrix = design.assign(levels, window=window, **given)
            shape = (len(levels[0]), len(levels))
            require(matrix.shape == shape, f"window {window} has shape {matrix.shape}, not {shape}")
            for k, column in enumerate(levels):
                same = np.array_equal(np.sort(matrix[:, k]), np.sort(column))
                require(same, f"window {window}, knob {k}: {matrix[:, k].tolist()} from the levels {column.tolist()}")


def the_same_arguments_give_the_same_design(design: Design) -> None:
    """A design depends on its arguments alone, not on what was asked before, and leaves them as they were."""
    for levels, given in _cases(design):
        kept = [column.copy() for column in levels]
        first = [design.assign(levels, window=window, **given) for window in WINDOWS]
        again = [design.assign(levels, window=window, **given) for window in reversed(WINDOWS)][::-1]
        same = all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))
        require(same, f"asked again about {len(levels[0])} replicas and {len(levels)} knobs it gave another design")
        unchanged = all(np.array_equal(one, other) for one, other in zip(kept, levels, strict=True))
        require(unchanged, "it wrote into the levels it was given")
        first[0][:] = 99.0
        fresh = design.assign(levels, window=0, **given)
        require(not (fresh == 99.0).any(), "it hands out an array that it keeps")


def a_copy_of_it_decides_the_same(design: Design) -> None:
    """Another process, which read the declaration, hands out the same levels."""
    other = Design.from_dict(design.to_dict())
    for levels, given in _cases(design):
        one, two = design.assign(levels, window=7, **given), other.assign(levels, window=7, **given)
        require(np.array_equal(one, two), f"{one.tolist()} and {two.tolist()}")


def bad_arguments_are_refused(design: Design) -> None:
    """No knob, lengths that differ, and a name given twice are each a ConfigError."""
    levels = [TwoLevel(0.5).levels(4)] * 2

    def attempt(levels: Levels, names: Sequence[str], detail: str) -> None:
        refused(lambda: design.assign(levels, seed=0, window=0, names=names, two_level=[True] * len(names)), detail)

    attempt([], [], "a design of no knob")
    attempt(levels, ["a"], "two knobs with one name between them")
    attempt(levels, ["a", "a"], "a name given twice")
    attempt([levels[0], TwoLevel(0.5).levels(6)], ["a", "b"], "4 levels of one knob and 6 of another")
