"""What every estimator does, besides the laws of `hdet.testing`, which tests/test_conformance.py puts it to."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdet.contrib import EvolutionStrategy, Kalman, Marginal
from hdet.controllers import Estimate, to_plain
from hdet.controllers.estimators import Comparison, Estimator, LeastSquares, Softmax
from hdet.spec import members

ESTIMATORS = [
    Marginal(),
    Marginal(replica_noise=True),
    LeastSquares(),
    LeastSquares(curvature=True),
    LeastSquares(replica_noise=True),
    Kalman(),
    Kalman(replica_noise=True),
    EvolutionStrategy(ranks=False),
    EvolutionStrategy(),
    Softmax(0.1),
]
SLOPES = [each for each in ESTIMATORS if not isinstance(each, Softmax) and each != EvolutionStrategy()]
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
seeds = st.integers(0, 2**32 - 1)
brisk = settings(max_examples=15)


def windows(seed: int, *, knobs: int = 2, replicas: int = 8, batches: int = 0) -> list[Comparison]:
    """Three windows of a noisy quadratic under a moving base; batches = 0 for losses [N]."""
    draw = np.random.default_rng(seed)
    comparisons = []
    for _ in range(3):
        levels, shifts = draw.uniform(-0.5, 0.5, (replicas, knobs)), draw.normal(size=knobs)
        losses = 2 + ((shifts + levels - 1) ** 2).sum(axis=1) / 2
        noise = draw.normal(0, 0.1, (replicas, batches) if batches else replicas)
        losses = (losses[:, None] if batches else losses) + noise
        comparisons.append(Comparison(levels, losses, shifts, np.ones(replicas, dtype=bool)))
    return comparisons


def last(estimator: Estimator, comparisons: list[Comparison]) -> list[Estimate]:
    state: Any = estimator.start(comparisons[0].knobs)
    estimates: list[Estimate] = []
    for comparison in comparisons:
        estimates, state = estimator.estimate(state, comparison)
    return estimates


def same(left: list[Estimate], right: list[Estimate], tolerance: float = 1e-6) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        for name in ("slope", "stderr", "curvature", "curvature_stderr"):
            one, other = getattr(a, name), getattr(b, name)
            assert (one is None) == (other is None)
            assert one is None or one == pytest.approx(other, rel=tolerance, abs=tolerance)


def test_every_member_is_tested() -> None:
    own = {member for member in members(Estimator).values() if member.__module__.startswith("hdet.")}
    assert {type(each) for each in ESTIMATORS} >= own


@pytest.mark.parametrize("estimator", SLOPES, ids=repr)
@given(seed=seeds, factor=st.floats(0.01, 100))
@brisk
def test_the_units_of_the_loss_carry_through(estimator: Estimator, seed: int, factor: float) -> None:
    comparisons = windows(seed)
    scaled = [Comparison(c.levels, c.losses * factor, c.shifts, c.valid) for c in comparisons]
    expected = [
        Estimate(
            e.slope * factor,
            None if e.curvature is None else e.curvature * factor,
            e.stderr * factor,
            None if e.curvature_stderr is None else e.curvature_stderr * factor,
        )
        for e in last(estimator, comparisons)
    ]
    same(expected, last(estimator, scaled))


@every_estimator
@pytest.mark.parametrize("batches", [0, 4])
@given(
    seed=seeds,
    garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e300]),
    gone=st.lists(st.integers(0, 7), min_size=1, max_size=3, unique=True),
)
@brisk
def test_invalid_replicas_might_as_well_not_exist(
    estimator: Estimator, batches: int, seed: int, garbage: float, gone: list[int]
) -> None:
    comparisons = windows(seed, batches=batches)
    kept = np.setdiff1d(np.arange(8), gone)
    spoilt, fewer = [], []
    for c in comparisons:
        levels, losses, valid = c.levels.copy(), c.losses.copy(), c.valid.copy()
        levels[gone], losses[gone], valid[gone] = garbage, garbage, False
        spoilt.append(Comparison(levels, losses, c.shifts, valid))
        fewer.append(Comparison(c.levels[kept], c.losses[kept], c.shifts, c.valid[kept]))
    assert last(estimator, spoilt) == last(estimator, fewer)


@every_estimator
@pytest.mark.parametrize("heard", [0, 1])
def test_fewer_than_two_replicas_teach_nothing(estimator: Estimator, heard: int) -> None:
    first, second, _ = windows(5)
    _, state = estimator.estimate(estimator.start(2), first)
    valid = np.arange(8) < heard
    estimates, after = estimator.estimate(state, Comparison(second.levels, second.losses, second.shifts, valid))
    assert estimates == [Estimate.nothing()] * 2
    assert to_plain(after) == to_plain(state)


@every_estimator
@pytest.mark.parametrize("batches", [0, 4])
def test_a_knob_without_spread_is_unknown_and_does_not_disturb(estimator: Estimator, batches: int) -> None:
    comparisons = windows(11, knobs=1, batches=batches)
    still = [
        Comparison(np.hstack([c.levels, np.zeros((8, 1))]), c.losses, np.append(c.shifts, 0.3), c.valid)
        for c in comparisons
    ]
    alone, (moving, resting) = last(estimator, comparisons), last(estimator, still)
    same(alone, [moving])
    assert not resting.known


@every_estimator
@given(losses=st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=6, max_size=6))
@brisk
def test_no_loss_whatever_makes_an_estimate_nan(estimator: Estimator, losses: list[float]) -> None:
    levels = np.linspace(-1, 1, 6)[:, None]
    comparison = Comparison(levels, np.array(losses), np.zeros(1), np.ones(6, dtype=bool))
    (estimate,), state = estimator.estimate(estimator.start(1), comparison)
    assert math.isfinite(estimate.slope)
    assert not math.isnan(estimate.stderr)
    for value in to_plain(state).values():
        assert np.isfinite(np.array(value)).all()


@pytest.mark.parametrize("estimator", SLOPES, ids=repr)
@given(slopes=st.lists(st.floats(-10, 10), min_size=3, max_size=3), width=st.floats(1e-3, 2))
@brisk
def test_an_exactly_linear_loss_is_recovered(estimator: Estimator, slopes: list[float], width: float) -> None:
    # A full factorial, so that Marginal is exact as well.
    signs = np.array([[a, b, c] for a in (-1, 1) for b in (-1, 1) for c in (-1, 1)], dtype=np.float64)
    comparison = Comparison(signs * width, 3 + signs @ slopes * width, np.zeros(3), np.ones(8, dtype=bool))
    estimates, _ = estimator.estimate(estimator.start(3), comparison)
    for estimate, slope in zip(estimates, slopes, strict=True):
        assert estimate.slope == pytest.approx(slope, rel=1e-4, abs=1e-4)
