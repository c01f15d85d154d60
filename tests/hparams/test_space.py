"""Spaces at any numbers and at small ones; their laws are in `hdet.testing`, see tests/test_conformance.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hdet.errors import ConfigError
from hdet.hparams.space import Arcsine, Linear, Log, Logit, Relative, Space

SPACES: list[Space] = [Log(), Logit(), Linear(), Linear(0.03), Relative(), Arcsine()]
each_space = pytest.mark.parametrize("space", SPACES, ids=repr)
shifts = st.one_of(st.floats(-3, 3), st.floats(allow_nan=False))


def values(space: Space) -> st.SearchStrategy[float]:
    low, high = space.domain
    return st.floats(
        None if math.isinf(low) else low, None if math.isinf(high) else high, allow_nan=False, allow_infinity=False
    )


def moderate(space: Space) -> st.SearchStrategy[float]:
    """Values at which a double still has digits to spare for the coordinate."""
    return st.floats(1e-6, 1 - 1e-6) if space.domain[1] == 1.0 else st.floats(1e-6, 1e6)


@each_space
@given(data=st.data())
@settings(max_examples=100)
def test_apply_stays_in_the_domain_and_is_monotone(space: Space, data: Any) -> None:
    value, one, other = data.draw(values(space)), data.draw(shifts), data.draw(shifts)
    less, more = sorted([one, other])
    lower, upper = space.apply(value, less), space.apply(value, more)
    low, high = space.domain
    assert low <= lower <= high
    assert low <= upper <= high
    assert lower <= upper or math.isclose(lower, upper, rel_tol=1e-12)
    assert type(lower) is float


@each_space
@given(data=st.data())
@settings(max_examples=100)
def test_difference_inverts_apply(space: Space, data: Any) -> None:
    origin, shift = data.draw(moderate(space)), data.draw(st.floats(-3, 3))
    moved = space.apply(origin, shift)
    if space.domain[1] == 1.0:
        assume(1e-6 < moved < 1 - 1e-6)
    elif isinstance(space, Relative):
        assume(moved > 0)
    resolution = math.ulp(abs(origin) + abs(moved)) / space.scale if isinstance(space, Linear) else 0.0
    assert space.difference(moved, origin) == pytest.approx(shift, rel=1e-9, abs=2e-9 + 4 * resolution)


@each_space
@given(data=st.data())
@settings(max_examples=100)
def test_apply_inverts_difference(space: Space, data: Any) -> None:
    origin, value = data.draw(moderate(space)), data.draw(moderate(space))
    assert space.apply(origin, space.difference(value, origin)) == pytest.approx(value, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("space", [Log(), Logit(), Linear(0.03)], ids=repr)
@given(data=st.data())
@settings(max_examples=60)
def test_shifts_add_up(space: Space, data: Any) -> None:
    value, one, two = data.draw(moderate(space)), data.draw(st.floats(-3, 3)), data.draw(st.floats(-3, 3))
    assert space.apply(space.apply(value, one), two) == pytest.approx(space.apply(value, one + two), rel=1e-9)


@each_space
@given(data=st.data())
@settings(max_examples=100)
def test_difference_is_a_signed_number_for_every_pair(space: Space, data: Any) -> None:
    value, origin = data.draw(values(space)), data.draw(values(space))
    shift = space.difference(value, origin)
    assert not math.isnan(shift)
    assert shift * np.sign(value - origin) >= 0 or value == origin


@each_space
@given(data=st.data())
@settings(max_examples=60)
def test_room_reaches_the_bounds_and_no_farther(space: Space, data: Any) -> None:
    low, value, high = sorted(data.draw(st.tuples(*[moderate(space)] * 3)))
    assume(low < high)
    down, up = space.room(value, (low, high))
    assert down >= 0
    assert up >= 0
    assert space.apply(value, -down) == pytest.approx(low, rel=1e-9, abs=1e-9)
    assert space.apply(value, up) == pytest.approx(high, rel=1e-9, abs=1e-9)
    assert space.room(low, (value, high))[0] == 0.0
    assert space.room(high, (low, value))[1] == 0.0


def test_exact_small_numbers() -> None:
    assert Log().apply(3.0, math.log(2.0)) == pytest.approx(6.0, rel=1e-15)
    assert Logit().apply(0.5, math.log(3.0)) == pytest.approx(0.75, rel=1e-15)
    assert Linear(0.5).apply(1.0, 3.0) == 2.5
    assert Relative().apply(9e-4, 1 / 9) == 9e-4 * (1 + 1 / 9)
    assert Arcsine().apply(0.5, math.pi / 12) == pytest.approx(0.75, rel=1e-15)
    assert Arcsine().difference(1.0, 0.0) == math.pi / 2


def test_edges_stay_or_are_reached_as_each_space_says() -> None:
    assert Log().apply(0.0, 800.0) == 0.0
    assert Log().apply(1e-300, 1390.0) == pytest.approx(math.exp(1390.0 - 300 * math.log(10)), rel=1e-9)
    assert Log().apply(1.0, -math.inf) == 0.0
    assert Log().apply(1.0, math.inf) == math.inf
    assert Log().room(1.0, (0.0, math.inf)) == (math.inf, math.inf)
    assert Log().room(0.0, (0.0, 1.0)) == (0.0, math.inf)
    assert Logit().apply(0.0, 50.0) == 0.0
    assert Logit().apply(1.0, -50.0) == 1.0
    assert Logit().room(0.5, (0.0, 1.0)) == (math.inf, math.inf)
    assert Relative().apply(2.0, -1.5) == 0.0
    assert Relative().room(2.0, (0.0, 3.0)) == (1.0, 0.5)
    assert Arcsine().apply(0.9, 9.0) == 1.0
    assert Arcsine().apply(1.0, -0.1) < 1.0
    assert Arcsine().room(0.5, (0.0, 1.0)) == pytest.approx((math.pi / 4, math.pi / 4))
    assert Linear().room(3.0, (-math.inf, 5.0)) == (math.inf, 2.0)


def test_small_differences_keep_their_digits() -> None:
    assert Log().difference(1.0 + 2.0**-40, 1.0) == pytest.approx(2.0**-40, rel=1e-11)


def test_numpy_scalars_become_floats() -> None:
    assert type(Linear().apply(np.float64(1.0), np.float64(0.5))) is float
    assert type(Log().apply(np.float64(1.0), 0.0)) is float


@pytest.mark.parametrize(
    ("space", "value"),
    [(Log(), -1e-9), (Logit(), 1.1), (Arcsine(), -0.1), (Relative(), -1.0), (Linear(), math.inf), (Log(), math.nan)],
)
def test_values_outside_the_domain_are_refused(space: Space, value: float) -> None:
    message = r"outside .*'s domain .*another space"
    with pytest.raises(ConfigError, match=message):
        space.apply(value, 0.0)
    with pytest.raises(ConfigError, match=message):
        space.difference(0.5, value)


@pytest.mark.parametrize(
    ("space", "bounds", "message"),
    [
        (Log(), (-1.0, 1.0), "reach outside Log's domain"),
        (Logit(), (0.0, 1.5), "reach outside Logit's domain"),
        (Linear(), (1.0, 1.0), "low < high"),
        (Arcsine(), (0.9, 0.1), "low < high"),
        (Linear(), (math.nan, 1.0), "low < high"),
    ],
)
def test_check_names_the_bounds_it_refuses(space: Space, bounds: tuple[float, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        space.check(bounds)


def test_check_accepts_open_ends() -> None:
    Log().check((0.0, math.inf))
    Linear().check((-math.inf, math.inf))
    Logit().check((0.0, 1.0))


def test_scale_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="scale"):
        Linear(0.0)
