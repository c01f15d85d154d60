import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdet.controllers import Context, Estimate, Gated, NoState
from hdet.controllers.estimators import Comparison, Softmax


def displaced(levels: object, losses: object, sigma: float) -> Estimate:
    column = np.array(levels, dtype=np.float64)[:, None]
    comparison = Comparison(column, np.array(losses), np.zeros(1), np.ones(len(column), dtype=bool))
    return Softmax(sigma).estimate(NoState(), comparison)[0][0]


def test_by_hand() -> None:
    # s = (mean - L) / 0.1 = (-1, 0, 1): w = (1, e, e^2) / (1 + e + e^2); Delta = (e^2 - 1) / (1 + e + e^2).
    e = math.e
    expected = (e**2 - 1) / (1 + e + e**2)
    assert displaced([-1.0, 0.0, 1.0], [2.1, 2.0, 1.9], 0.1).slope == pytest.approx(-expected)


def test_levels_that_do_not_centre_on_the_base_displace_nothing_by_themselves() -> None:
    assert displaced([0.0, 0.0, 0.3, 0.3], [1.0, 1.0, 1.0, 1.0], 0.1).slope == 0


@pytest.mark.parametrize("n", [2, 3, 8])
@given(slope=st.floats(-3, 3), width=st.floats(0.01, 1), sigma=st.floats(0.05, 2))
@settings(max_examples=25)
def test_first_order_relation_to_the_slope(n: int, slope: float, width: float, sigma: float) -> None:
    # Delta = -(a^2 c_N / sigma) dL/dz + O(slope^2), c_N = (N + 1) / (3 (N - 1)), for the paper's levels.
    levels = width * (np.arange(n) - (n - 1) / 2) / ((n - 1) / 2)
    small = 1e-4 * sigma / width
    constant = (n + 1) / (3 * (n - 1))
    delta = -displaced(levels, 2 + small * slope * levels, sigma).slope
    expected = -(width**2) * constant / sigma * small * slope
    assert delta == pytest.approx(expected, rel=1e-2, abs=1e-7 * width)


@given(losses=st.lists(st.floats(-1e6, 1e6), min_size=4, max_size=4), sigma=st.floats(1e-3, 10))
@settings(max_examples=50)
def test_the_displacement_never_leaves_the_spread(losses: list[float], sigma: float) -> None:
    assert abs(displaced([-0.3, -0.1, 0.1, 0.3], losses, sigma).slope) <= 0.3 * (1 + 1e-12)


@pytest.mark.parametrize("batches", [0, 8])
def test_the_t_of_a_placebo_is_honest(batches: int) -> None:
    draw = np.random.default_rng(5)
    levels = np.linspace(-0.1, 0.1, 8)
    shape = (8, batches) if batches else (8,)
    t = [displaced(draw.permutation(levels), draw.normal(0, 0.02, shape), 0.1).t for _ in range(2000)]
    assert np.std(t) == pytest.approx(math.sqrt(7 / 5) if batches else 1.0, rel=0.15)


def test_delta_method_weights_are_the_derivative() -> None:
    # With one sub-batch raised by h in replica r and the other lowered, the error is |d slope / d L_r| h.
    levels, losses, h = [-0.3, 0.0, 0.1, 0.2], np.array([2.0, 1.9, 2.2, 2.05]), 1e-5
    for r in range(4):
        bump = np.where(np.arange(4) == r, h, 0.0)
        up, down = displaced(levels, losses + bump, 0.1), displaced(levels, losses - bump, 0.1)
        split = displaced(levels, np.stack([losses + bump, losses - bump], axis=1), 0.1)
        assert split.stderr == pytest.approx(abs(up.slope - down.slope) / 2, rel=1e-4)


def test_delta_method_error_by_hand() -> None:
    # Equal means: w = 1/2 each, d slope / d L = w z / sigma = (-5, 5), so the two sub-batches give
    # 5 (L_2 - L_1) = 0.5 and -0.5: sd = 0.5 sqrt 2, error = sd / sqrt 2 = 0.5.
    estimate = displaced([-1.0, 1.0], [[1.0, 1.0], [1.1, 0.9]], 0.1)
    assert estimate.slope == pytest.approx(0, abs=1e-12)
    assert estimate.stderr == pytest.approx(0.5)


@pytest.mark.parametrize("smoothing", [0.0, 0.5])
def test_the_error_of_losses_without_sub_batches_by_hand(smoothing: float) -> None:
    # w = (1 - p, p) with p = 1 / (1 + e^-2), d slope / d L = -+2 p (1 - p) / sigma, and the losses' sd is 0.1 sqrt 2.
    (told,) = windows(Softmax(0.1, smoothing=smoothing), [([-1.0, 1.0], [1.1, 0.9])])
    p = 1 / (1 + math.exp(-2.0))
    assert told.stderr == pytest.approx(0.1 * math.sqrt(2) * math.sqrt(2) * 2 * p * (1 - p) / 0.1)
    assert told.freedom is None


@pytest.mark.parametrize("smoothing", [0.0, 0.5])
@pytest.mark.parametrize("batches", [1, 3])
def test_where_levels_are_centred_changes_nothing(batches: int, smoothing: float) -> None:
    draw, rule = np.random.default_rng(2), Softmax(0.1, smoothing=smoothing)
    levels, losses = draw.normal(size=(5, 2)), draw.normal(1.0, 0.1, (5, batches))
    told = []
    for offset in (np.zeros(2), np.array([3.0, -2.0])):
        comparison = Comparison(levels + offset, losses, np.zeros(2), np.ones(5))
        told.append([(one.slope, one.stderr) for one in rule.estimate(rule.start(knobs=2), comparison)[0]])
    assert told[0] == [pytest.approx(one) for one in told[1]]


# -- smoothing --------------------------------------------------------------------------------------


def windows(rule: Softmax, rows: list[tuple[list[float], list[float]]]) -> list[Estimate]:
    """One knob over several windows, each of (levels by replica, losses by replica)."""
    state, told = rule.start(knobs=1), []
    for levels, losses in rows:
        valid = np.isfinite(losses)
        comparison = Comparison(np.array(levels)[:, None], np.array(losses), np.zeros(1), valid)
        (estimate,), state = rule.estimate(state, comparison)
        told.append(estimate)
    return told


def test_smoothing_by_hand_follows_levels_and_not_replicas() -> None:
    # The advantages of the levels -1, 1 are (-.1, .1) in the first window and (.2, -.2) in the second, where the
    # replicas have changed places. b = .5: m = .5 a_1, then .25 a_1 + .5 a_2, over 1 - .25.
    first, second = windows(Softmax(0.1, smoothing=0.5), [([-1.0, 1.0], [1.1, 0.9]), ([1.0, -1.0], [1.2, 0.8])])
    assert first.slope == pytest.approx(-math.tanh(1.0))
    smoothed = (0.25 * 0.1 + 0.5 * -0.2) / 0.75
    assert second.slope == pytest.approx(-math.tanh(smoothed / 0.1))


def test_the_first_window_is_as_without_smoothing() -> None:
    rows = [([-0.3, -0.1, 0.1, 0.3], [2.0, 1.9, 2.2, 2.05])]
    (plain,), (smoothed,) = windows(Softmax(0.1), rows), windows(Softmax(0.1, smoothing=0.9), rows)
    assert (smoothed.slope, smoothed.stderr) == pytest.approx((plain.slope, plain.stderr))


def test_a_level_whose_replica_failed_keeps_what_was_known_of_it() -> None:
    rows = [([-1.0, 0.0, 1.0], [1.2, 1.0, 0.8]), ([-1.0, 0.0, 1.0], [math.nan, 1.0, 1.0])]
    told = windows(Softmax(0.1, smoothing=0.5), rows)
    m = np.array([-0.2, 0.25 * 0.0 / 0.75, 0.25 * 0.2 / 0.75])
    w = np.exp(m / 0.1) / np.exp(m / 0.1).sum()
    assert told[1].slope == pytest.approx(-float(w @ [-1.0, 0.0, 1.0]))


def test_a_replica_that_is_not_valid_is_not_heard() -> None:
    """Its loss may be finite all the same, as where the last update made its weights NaN."""
    levels, losses = np.array([[-1.0], [0.0], [1.0]]), np.random.default_rng(3).normal(1.0, 0.1, (3, 8))
    rule = Softmax(0.1, smoothing=0.5)

    def told(first: float) -> Estimate:
        valid, own = np.array([False, True, True]), np.vstack([np.full(8, first), losses[1:]])
        own[0, 0] = -first
        (estimate,), _ = rule.estimate(rule.start(knobs=1), Comparison(levels, own, np.zeros(1), valid))
        return estimate

    assert told(1e6) == told(math.nan)


@pytest.mark.parametrize("smoothing", [0.0, 0.5])
def test_few_sub_batches_pass_a_gate_by_chance_as_seldom_as_many(smoothing: float) -> None:
    draw, gate = np.random.default_rng(11), Gated(gate=2.0)
    passed = 0
    for _ in range(1000):
        comparison = Comparison(np.array([[-0.1], [0.1]]), draw.normal(1, 1e-3, (2, 3)), np.zeros(1), np.ones(2))
        rule = Softmax(0.1, smoothing=smoothing)
        (estimate,), _ = rule.estimate(rule.start(knobs=1), comparison)
        passed += gate.step(gate.start(), estimate, Context())[0] != 0.0
    assert passed / 1000 < 0.08  # 5 % are expected, and 18 % of Student's t on 2 degrees of freedom


def test_the_smoothed_t_of_a_placebo_is_honest() -> None:
    draw = np.random.default_rng(7)
    ladder = np.linspace(-0.1, 0.1, 8)
    rows = [(draw.permutation(ladder).tolist(), draw.normal(0, 0.02, 8).tolist()) for _ in range(6000)]
    t = [estimate.t for estimate in windows(Softmax(0.1, smoothing=0.8), rows)][50:]
    assert np.std(t) == pytest.approx(1.0, rel=0.15)
    assert np.corrcoef(t[:-1], t[1:])[0, 1] == pytest.approx(0.8, abs=0.05)  # they share what they remember


def test_another_number_of_replicas_begins_anew() -> None:
    rule = Softmax(0.1, smoothing=0.9)
    rows = [([-1.0, 1.0], [1.5, 0.5]), ([-1.0, 0.0, 1.0], [1.1, 1.0, 1.2])]
    alone = windows(rule, rows[1:])
    assert windows(rule, rows)[1] == alone[0]
