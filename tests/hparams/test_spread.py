"""Levels of any width and number; the laws of spreads are in `hdet.testing`, see tests/test_conformance.py."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hdet.contrib import Geometric
from hdet.errors import ConfigError
from hdet.hparams.spread import OneSided, Spread, Symmetric, TwoLevel

widths = st.floats(1e-9, 1e3)
spreads: st.SearchStrategy[Spread] = st.one_of(
    st.builds(Symmetric, width=widths),
    st.builds(TwoLevel, width=widths),
    st.builds(Geometric, width=widths, ratio=st.floats(1.01, 50)),
    st.builds(OneSided, width=widths, side=st.sampled_from(["up", "down"])),
)


@given(spread=spreads, n=st.integers(2, 70))
def test_levels_ascend_stay_within_the_width_and_sum_to_zero(spread: Spread, n: int) -> None:
    levels = spread.levels(n)
    assert levels.shape == (n,)
    assert levels.dtype == np.float64
    assert (np.diff(levels) >= 0).all()
    assert np.abs(levels).max() <= spread.width
    assert levels.any()
    assert abs(math.fsum(levels)) <= n * math.ulp(spread.width)
    if not isinstance(spread, OneSided):
        assert spread.centre(n) == 0.0
        np.testing.assert_array_equal(levels, -levels[::-1])
        assert levels[-1] == spread.width


@given(width=widths, n=st.integers(2, 70), side=st.sampled_from(["up", "down"]))
def test_one_sided_leaves_half_exactly_at_the_base(width: float, n: int, side: Literal["up", "down"]) -> None:
    spread = OneSided(width, side=side)
    offsets = spread.centre(n) + spread.levels(n)
    assert np.count_nonzero(offsets == 0.0) == n - n // 2
    moved = offsets[offsets != 0.0] * (1 if side == "up" else -1)
    np.testing.assert_allclose(moved, width, rtol=1e-14)


def test_exact_small_numbers() -> None:
    assert Symmetric(1.0).levels(5).tolist() == [-1.0, -0.5, 0.0, 0.5, 1.0]
    assert Symmetric(0.5).levels(2).tolist() == [-0.5, 0.5]
    assert TwoLevel(0.25).levels(4).tolist() == [-0.25, -0.25, 0.25, 0.25]
    assert TwoLevel(0.25).levels(3).tolist() == [-0.25, 0.0, 0.25]
    assert Geometric(1.0).levels(6).tolist() == [-1.0, -0.5, -0.25, 0.25, 0.5, 1.0]
    assert Geometric(1.0, ratio=10.0).levels(3).tolist() == [-1.0, 0.0, 1.0]
    assert OneSided(1.0).levels(2).tolist() == [-0.5, 0.5]
    assert OneSided(1.0).centre(2) == 0.5
    assert OneSided(5.0).levels(5).tolist() == [-2.0, -2.0, -2.0, 3.0, 3.0]
    assert OneSided(5.0, "down").levels(5).tolist() == [-3.0, -3.0, 2.0, 2.0, 2.0]
    assert OneSided(5.0, "down").centre(5) == -2.0


def test_the_papers_multipliers() -> None:
    rho = 1 + Symmetric().levels(8)
    a, n = 1 / 9, 8
    expected = [1 + a * (r - (n - 1) / 2) / max((n - 1) / 2, 1 / 2) for r in range(n)]
    np.testing.assert_allclose(rho, expected, rtol=1e-15)


@pytest.mark.parametrize("kind", [Symmetric, TwoLevel, Geometric, OneSided])
def test_a_single_replica_cannot_be_spread(kind: type[Spread]) -> None:
    with pytest.raises(ConfigError, match=r"one replica.*width=0\.5.*counterfactual"):
        kind(0.5).levels(1)
    with pytest.raises(ConfigError, match="n=0"):
        kind(0.5).levels(0)


@pytest.mark.parametrize(
    ("given_fields", "field"),
    [
        ({"kind": "two_level", "width": -0.1}, "width"),
        ({"kind": "two_level"}, "width"),
        ({"kind": "two_level", "width": float("inf")}, "width"),
        ({"kind": "geometric", "width": 0.1, "ratio": 1.0}, "ratio"),
        ({"kind": "one_sided", "width": 0.1, "side": "left"}, "side"),
    ],
)
def test_errors_name_the_field(given_fields: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Spread.from_dict(given_fields)


@pytest.mark.parametrize(
    "found", [[0.3, 0.3, 0.3], [-0.1, 0.1], [-0.1, float("nan"), 0.1], [math.inf] * 3, [[-0.1, 0.0, 0.1]]]
)
def test_levels_of_ones_own_that_are_no_levels_are_refused(found: list[Any]) -> None:
    class Own(Spread):
        def _levels(self, n: int) -> NDArray[np.float64]:
            return np.array(found)

    with pytest.raises(ConfigError, match=r"Own\._levels\(3\) gave .*, and 3 levels whose sum is 0 are wanted"):
        Own(0.3).levels(3)
