"""Sums over windows by sub-batch: t is honest whether windows share their probe or not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from hdet.controllers import Context, Estimate, Gated
from hdet.controllers.rules import Lower, Raise, SlopeSum
from hdet.sub_batches import accumulated, as_of_eight, normal_equivalent, student

J, WINDOWS, RUNS = 8, 12, 800


@pytest.mark.parametrize("freedom", [5, 7, 15, 100])
def test_the_normal_equivalent_is_as_unlikely(freedom: int) -> None:
    for p in (0.6, 0.84, 0.975, 0.999):
        t, z = stats.t.ppf(p, freedom), stats.norm.ppf(p)
        assert normal_equivalent(t, freedom) == pytest.approx(z, rel=0.02)
        assert normal_equivalent(-t, freedom) == -normal_equivalent(t, freedom)


@given(st.floats(allow_nan=False), st.floats(allow_nan=False), st.integers(1, 100))
def test_the_normal_equivalent_keeps_order_and_never_overflows(one: float, two: float, freedom: int) -> None:
    low, high = sorted((one, two))
    assert normal_equivalent(low, freedom) <= normal_equivalent(high, freedom)
    assert math.isfinite(one) == math.isfinite(normal_equivalent(one, freedom))


@pytest.mark.parametrize("freedom", [1, 2, 3, 5])
def test_as_of_eight_is_as_unlikely(freedom: int) -> None:
    """Far out, of two or three sub-batches, it is a little too careful."""
    for p, least in ((0.6, 0.99), (0.84, 0.99), (0.975, 0.92), (0.999, 0.83)):
        t, eight = stats.t.ppf(p, freedom), stats.t.ppf(p, 7)
        assert least * eight < as_of_eight(t, freedom) < 1.03 * eight
        assert as_of_eight(-t, freedom) == -as_of_eight(t, freedom)


@given(st.floats(allow_nan=False), st.floats(allow_nan=False), st.integers(1, 100))
def test_as_of_eight_keeps_order_and_never_overflows(one: float, two: float, freedom: int) -> None:
    low, high = sorted((one, two))
    assert as_of_eight(low, freedom) <= as_of_eight(high, freedom)
    assert math.isfinite(one) == math.isfinite(as_of_eight(one, freedom))
    assert as_of_eight(one, 7) == as_of_eight(one, 63) == one, "what was chosen with eight stays as it was"


@pytest.mark.parametrize("few", [2, 3, 4])
def test_few_sub_batches_move_a_rate_by_chance_as_seldom_as_eight(few: int) -> None:
    """By t as it is two sub-batches raise it in 15 % of windows, and lower it in 10 %."""
    rng = np.random.default_rng(0)
    seldom = {rule: _spoken(rule, 8, rng) for rule in ("raise", "lower")}
    assert 0.03 < seldom["raise"] < 0.055
    assert 0.005 < seldom["lower"] < 0.02
    for rule, share in seldom.items():
        assert _spoken(rule, few, rng) == pytest.approx(share, abs=0.012)


def _spoken(rule: str, sub_batches: int, rng: np.random.Generator) -> float:
    """The share of 4000 windows in which a rule moves a rate without effect."""
    context, moved = Context(), 0
    for slopes in rng.normal(size=(4000, sub_batches)):
        told = Estimate.of_sub_batches(slopes)
        if rule == "raise":
            moved += (Raise().propose(Raise().start(), told, context) or 0.0) > 0.0
        else:
            moved += (Lower().propose(Lower().start(), Estimate(0.0, averaged=told), context) or 0.0) < 0.0
    return moved / 4000


# In any of the units a number is 0 or has all its digits.
EXACT = st.floats(-1e300, 1e300).filter(lambda value: value == 0.0 or abs(value) > 1e-100)


@given(st.lists(EXACT, min_size=2, max_size=9), st.sampled_from([1e-200, 1e-3, 7.0]))
def test_student_does_not_depend_on_the_unit(values: list[float], unit: float) -> None:
    assert student([unit * v for v in values]) == pytest.approx(student(values), rel=1e-6, abs=1e-6) or unit < 1e-100


def test_student_by_hand() -> None:
    """Mean 2, sd sqrt(2/3), so t = 2 / (sqrt(2/3) / 2) = 4.899 on 3 degrees of freedom."""
    assert student([1.0, 2.0, 3.0, 2.0]) == pytest.approx(normal_equivalent(math.sqrt(24), 3))
    assert student([0.0, 0.0]) == 0.0
    assert student([1.0, -1.0]) == 0.0
    assert student([-3.0, -3.0]) == -math.inf


def test_sums_are_begun_anew_where_they_cannot_go_on() -> None:
    assert accumulated((2.0, 4.0), (1.0, 1.0), 0.5) == (2.0, 3.0)
    assert accumulated((2.0, 4.0, 1.0), (1.0, 1.0), 0.5) == (1.0, 1.0), "another number of sub-batches"
    assert accumulated((1.7e308, 0.0), (1.7e308, 1.0), 1.0) == (1.7e308, 1.0), "an overflow"


def placebo(fixed: bool, seed: int) -> NDArray[np.float64]:
    """[runs, windows, J] slopes of a knob without effect; windows on one probe have nearly one error."""
    rng = np.random.default_rng(seed)
    own = rng.normal(size=(RUNS, WINDOWS, J))
    return np.sqrt(0.97) * rng.normal(size=(RUNS, 1, J)) + np.sqrt(0.03) * own if fixed else own


def told(slopes: NDArray[np.float64]) -> Estimate:
    return Estimate(
        slope=float(slopes.mean()),
        stderr=float(slopes.std(ddof=1)) / math.sqrt(J),
        level=1.0,
        span=1.0,
        slopes=tuple(slopes.tolist()),
    )


def after_gated(state: Any, estimate: Estimate) -> Any:
    gated = Gated(memory=0.8)
    return gated.step(state or gated.start(), estimate, Context())[1]


def after_slope_sum(state: Any, estimate: Estimate) -> Any:
    rule = SlopeSum(memory=0.8, window_steps=None)
    return rule.observe(state or rule.start(), estimate, Context())


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed probe", "fresh probes"])
@pytest.mark.parametrize("summed", [after_gated, after_slope_sum])
def test_tau_of_a_placebo_is_honest_on_any_probe(summed: Any, fixed: bool) -> None:
    """|tau| > 1 in 32 % of runs and > 2 in 5 %. Were windows taken for independent: 57 % and 27 % on a fixed probe."""
    taus = []
    for run in placebo(fixed, seed=1):
        state = None
        for window in run:
            state = summed(state, told(window))
        taus.append(state.tau)
    size = np.abs(taus)
    assert np.std(taus) == pytest.approx(1.0, abs=0.08)
    assert (size > 1).mean() == pytest.approx(0.317, abs=0.05)
    assert (size > 2).mean() == pytest.approx(0.0455, abs=0.025)


def test_an_effect_that_every_sub_batch_shows_adds_up() -> None:
    rng = np.random.default_rng(0)
    gated, state, taus = Gated(memory=0.9), Gated().start(), []
    for _ in range(20):
        _, state = gated.step(state, told(0.5 + rng.normal(size=J)), Context())
        taus.append(state.tau)
    assert np.mean(taus[-5:]) > 3 > taus[0]
