import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hdet.contrib import Kalman, Marginal
from hdet.controllers import Context, Controller, HeavyBall, Newton
from hdet.controllers.estimators import Comparison, Estimator, LeastSquares

Array = NDArray[np.float64]
HADAMARD = np.array([[1.0]])
for _ in range(3):
    HADAMARD = np.block([[HADAMARD, HADAMARD], [HADAMARD, -HADAMARD]])


def heard(levels: Array, losses: Array, shifts: Array) -> Comparison:
    return Comparison(levels, losses, shifts, np.ones(len(levels), dtype=bool))


def test_the_first_window_is_least_squares() -> None:
    # The prior is diffuse, so the first slopes are those of the joint fit to 1 part in 1000.
    draw = np.random.default_rng(0)
    levels = 0.3 * HADAMARD[:, 1:5]
    comparison = heard(levels, levels @ [1.0, -0.5, 0.2, 0.0] + draw.normal(0, 0.01, 8), np.zeros(4))
    kalman, state = Kalman(), Kalman().start(4)
    joint = LeastSquares().estimate(LeastSquares().start(4), comparison)[0]
    for ours, theirs in zip(kalman.estimate(state, comparison)[0], joint, strict=True):
        assert ours.slope == pytest.approx(theirs.slope, rel=1e-3, abs=1e-3)
        assert ours.stderr == pytest.approx(theirs.stderr, rel=0.02)


def test_scalar_filter_by_hand() -> None:
    # Two replicas at -1, +1 with 4 sub-batches whose slopes are (0, 1, 1, 2): mean 1, variance 2/3, so
    # their mean has variance R = 1/6. Without drift, two such windows of slopes 1 and 3 average to 2 with
    # variance R / 2; the prior's variance 100 * 1 (scale: the mean squared contrast, 1) hardly matters.
    levels, slopes = np.array([[-1.0], [1.0]]), np.array([0.0, 1.0, 1.0, 2.0])
    kalman = Kalman(drift=0.0, memory=0.0)
    (first,), state = kalman.estimate(kalman.start(1), heard(levels, levels * slopes, np.zeros(1)))
    assert (first.slope, first.stderr) == pytest.approx((1.0, math.sqrt(1 / 6)), rel=2e-3)
    (second,), _ = kalman.estimate(state, heard(levels, levels * (slopes + 2), np.zeros(1)))
    assert (second.slope, second.stderr) == pytest.approx((2.0, math.sqrt(1 / 12)), rel=2e-3)


def test_two_levels_reveal_the_curvature_once_the_base_has_moved() -> None:
    # L = 2 (u - 1)^2 / 2, two levels: slope -2 at u = 0, then -1 at u = 1/2.
    levels = np.array([[-0.2], [0.2]])
    kalman = Kalman()
    state = kalman.start(1)
    for shift in (0.0, 0.5):
        losses = (shift + levels[:, 0] - 1) ** 2
        (estimate,), state = kalman.estimate(state, heard(levels, losses, np.array([shift])))
        assert estimate.slope == pytest.approx(2 * (shift - 1), rel=1e-2)
    assert estimate.curvature == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("batches", [0, 4])
@given(origin=st.floats(-5, 5), seed=st.integers(0, 1000))
@settings(max_examples=10)
def test_where_coordinate_zero_lies_does_not_matter(batches: int, origin: float, seed: int) -> None:
    # Prior and random walk belong to the base, not to a far-off origin; else memory would fade with distance.
    kalman, draw = Kalman(), np.random.default_rng(seed)
    here, there = kalman.start(2), kalman.start(2)
    for _ in range(4):
        levels, shifts = 0.3 * HADAMARD[draw.permutation(8), 1:3], draw.normal(size=2)
        losses = levels @ [1.0, 2.0] + draw.normal(0, 0.1, (batches, 8) if batches else 8)
        one, here = kalman.estimate(here, heard(levels, losses.T, shifts))
        other, there = kalman.estimate(there, heard(levels, losses.T, shifts + origin))
        for a, b in zip(one, other, strict=True):
            assert (a.slope, a.curvature, a.stderr, a.curvature_stderr) == pytest.approx(
                (b.slope, b.curvature, b.stderr, b.curvature_stderr), rel=1e-3, abs=1e-4
            )


def test_more_knobs_than_replicas_are_told_apart_over_windows() -> None:
    draw = np.random.default_rng(2)
    slopes = np.array([0.5, -0.4, 0.3, 0.0, 0.2, -0.1])
    kalman = Kalman()
    state = kalman.start(6)
    for window in range(30):
        levels = 0.3 * draw.choice([-1.0, 1.0], (4, 6))
        losses = levels @ slopes + draw.normal(0, 0.01, 4)
        estimates, state = kalman.estimate(state, heard(levels, losses, np.zeros(6)))
        if window == 0:
            assert max(abs(e.t) for e in estimates) < 2
    assert [e.slope for e in estimates] == pytest.approx(slopes, abs=0.06)
    assert all(e.stderr < 0.03 for e in estimates)


def test_an_outlier_after_the_first_window_hardly_counts() -> None:
    levels = 0.3 * HADAMARD[:, 1:3]
    truth = levels @ [0.1, 0.1]
    kalman = Kalman()
    state: Any = kalman.start(2)
    draw = np.random.default_rng(4)
    for _ in range(10):
        _, state = kalman.estimate(state, heard(levels, truth + draw.normal(0, 0.01, 8), np.zeros(2)))
    spoilt = truth.copy()
    spoilt[0] += 5.0
    noise = math.sqrt(state.squares / state.freedom)
    estimates, state = kalman.estimate(state, heard(levels, spoilt, np.zeros(2)))
    assert [e.slope for e in estimates] == pytest.approx([0.1, 0.1], abs=0.03)
    assert math.sqrt(state.squares / state.freedom) < 2 * noise, "one replica must not blind the filter"


@pytest.mark.parametrize("clusters", [1.0, 10.0])
def test_a_strong_honest_signal_is_not_taken_for_an_outlier(clusters: float) -> None:
    # Signs a, b, ab: the losses are 3, -1, -1, -1 (twice), so their median absolute deviation is nearly 0.
    signs = HADAMARD[:, [1, 2, 3]]
    losses = clusters * signs.sum(axis=1) + np.random.default_rng(0).normal(0, 0.01, 8)
    estimates, _ = Kalman().estimate(Kalman().start(3), heard(signs, losses, np.zeros(3)))
    assert [e.slope for e in estimates] == pytest.approx([clusters] * 3, rel=0.02)


@pytest.mark.parametrize(
    ("knobs", "batches", "slopes", "replicas"),
    [
        (1, 0, 0.0, 0.02),  # noise from residuals
        (4, 0, 0.0, 0.02),
        (4, 8, 0.1, 0.0),  # shared gradients: sub-batches disagree, replicas lie on a line
        (4, 8, 0.1, 0.02),  # local gradients: told so by replica_noise
        (4, 8, 0.1, 0.0005),
    ],
)
def test_errors_are_honest_once_the_noise_is_known(knobs: int, batches: int, slopes: float, replicas: float) -> None:
    """(slope - truth) / stderr has sd near 1, for a wandering base, placebo (curvature 0) included."""
    draw = np.random.default_rng(6)
    curvature = np.full(knobs, 0.1)
    curvature[-1] = 0.0
    kalman = Kalman(replica_noise=bool(batches and replicas))
    scores = []
    for _ in range(25):
        state, shifts = kalman.start(knobs), np.zeros(knobs)
        for window in range(20):
            levels = 0.3 * HADAMARD[draw.permutation(8)][:, 1 + draw.permutation(7)[:knobs]]
            places = shifts + levels
            losses = ((places - 1) ** 2 / 2) @ curvature + draw.normal(0, replicas, 8)
            if batches:
                losses = losses[:, None] + places @ draw.normal(0, slopes, (knobs, batches))
            estimates, state = kalman.estimate(state, heard(levels, losses, shifts))
            if window >= 8:
                scores.append(
                    [(e.slope - c * (s - 1)) / e.stderr for e, c, s in zip(estimates, curvature, shifts, strict=True)]
                )
            shifts = shifts + draw.normal(0, 0.2, knobs)
    assert 0.7 < np.std(scores) < 1.3
    assert 0.7 < np.std(np.array(scores)[:, -1]) < 1.35


def windows_to_arrive(estimator: Estimator, controller: Controller, seed: int) -> int:
    """Windows until each of four knobs, 2 off, has come within 0.3 for good; 120 if one never does."""
    draw = np.random.default_rng(seed)
    shifts = np.full(4, 2.0)
    state: Any = estimator.start(4)
    states: list[Any] = [controller.start() for _ in range(4)]
    arrived = 0
    for window in range(120):
        levels = 0.3 * HADAMARD[draw.permutation(8)][:, 1 + draw.permutation(7)[:4]]
        losses = 0.1 * ((shifts + levels) ** 2).sum(axis=1) / 2 + draw.normal(0, 0.02, 8)
        estimates, state = estimator.estimate(state, heard(levels, losses, shifts))
        for k, estimate in enumerate(estimates):
            move, states[k] = controller.step(states[k], estimate, Context(spread=0.3, shift=float(shifts[k])))
            shifts[k] += move
        if np.abs(shifts).max() > 0.3:
            arrived = window + 1
    return arrived


def test_kalman_arrives_in_fewer_windows_than_marginal() -> None:
    kalman = np.median([windows_to_arrive(Kalman(), Newton(), seed) for seed in range(12)])
    for rate in (0.5, 1.5, 4.0):
        marginal = np.median([windows_to_arrive(Marginal(), HeavyBall(0.9, rate), seed) for seed in range(12)])
        assert 2 * kalman < marginal


@pytest.mark.parametrize("batches", [1, 8])
@pytest.mark.parametrize("spike", [1e6, 1e8, 1e12, 1e100])
def test_one_enormous_loss_ends_nothing(spike: float, batches: int) -> None:
    """Two replicas, one wild window first: what the state leaves open is then 1e16 times the noise, or more."""
    rng = np.random.default_rng(0)
    kalman, levels = Kalman(), np.array([[-0.3], [0.3]])
    state, slopes = kalman.start(1), []
    for window in range(40):
        losses = 2.0 + 0.5 * levels + 0.01 * rng.normal(size=(2, batches))
        if window == 0:
            losses[1] = spike
        (estimate,), state = kalman.estimate(state, heard(levels, losses, np.zeros(1)))
        assert math.isfinite(estimate.slope)
        slopes.append(estimate.slope)
    # (Sub-batches that agree on a wild loss leave no doubt about it; it fades by the drift alone.)
    assert slopes[-1] == pytest.approx(0.5, abs=0.1) or batches > 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("estimator", [Kalman(), LeastSquares(), LeastSquares(curvature=True), Marginal()], ids=repr)
@pytest.mark.parametrize("scale", [5e-324, 1e-310, 1e154, 1e200, 1e308])
def test_levels_beyond_what_can_be_squared_are_no_error(estimator: Estimator, scale: float) -> None:
    levels = scale * np.array([[-1.0], [-0.4], [0.4], [1.0]])
    losses = np.array([1.0, 1.1, 1.2, 1.4])[:, None] + np.array([0.0, 0.01, -0.01])
    (estimate,), _ = estimator.estimate(estimator.start(1), heard(levels, losses, np.zeros(1)))
    assert math.isfinite(estimate.slope)
    assert not math.isnan(estimate.stderr)
