"""Least squares by hand, and whether its errors are honest: a placebo's t must spread as it claims."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from hdet.contrib import Marginal
from hdet.controllers.estimators import Comparison, LeastSquares, regression
from hdet.controllers.estimators.regression import regress

Array = NDArray[np.float64]


def test_one_column_by_hand() -> None:
    # x = -1, 0, 1; y = 1, 0, 3: slope = (-1 * 1 + 1 * 3) / 2 = 1; mean 4/3;
    # residuals = 1 - 1/3, 0 - 4/3, 3 - 7/3 = 2/3, -4/3, 2/3; s^2 = (24/9) / (3 - 1 - 1) = 8/3;
    # error = sqrt(8/3 / sum x^2) = sqrt(8/3 / 2).
    fit = regress(np.array([[-1.0], [0.0], [1.0]]), np.array([[1.0], [0.0], [3.0]]))
    assert fit.coefficients == pytest.approx([1.0])
    assert fit.stderr == pytest.approx([math.sqrt(4 / 3)])


def test_two_columns_by_hand() -> None:
    # y = 5 + 3 a + b + ab / 2 in orthogonal columns of +-1: the residual is ab / 2, on 4 - 1 - 2 = 1 degree
    # of freedom, so s^2 = 4 / 4 = 1 and each error sqrt(1 / sum x^2) = 1 / 2.
    a, b = np.array([-1.0, -1.0, 1.0, 1.0]), np.array([-1.0, 1.0, -1.0, 1.0])
    fit = regress(np.stack([a, b], axis=1), (5 + 3 * a + b + 0.5 * a * b)[:, None])
    assert fit.coefficients == pytest.approx([3.0, 1.0])
    assert fit.stderr == pytest.approx([0.5, 0.5])


def test_sub_batches_by_hand() -> None:
    # Slopes of the three sub-batches: 1, 2, 6: mean 3, sd = sqrt((4 + 1 + 9) / 2), error = sd / sqrt 3.
    x = np.array([[-1.0], [1.0]])
    fit = regress(x, x * np.array([1.0, 2.0, 6.0]) + np.array([10.0, -4.0, 0.0]))
    assert fit.coefficients == pytest.approx([3.0])
    assert fit.stderr == pytest.approx([math.sqrt(7 / 3)])


def test_no_degrees_of_freedom_no_error() -> None:
    fit = regress(np.array([[-1.0], [1.0]]), np.array([[0.0], [1.0]]))
    assert fit.coefficients == pytest.approx([0.5])
    assert fit.stderr.tolist() == [math.inf]


def test_aliased_columns_share_the_slope_and_have_no_error() -> None:
    x = np.array([-1.0, 1.0, -1.0, 1.0])
    other = np.array([-1.0, -1.0, 1.0, 1.0])
    fit = regress(np.stack([x, 2 * x, other], axis=1), (3 * x + other)[:, None])
    # In units of each column's own deviation both halves are 1.5: 1.5 per unit of x and 0.75 per unit of 2x.
    assert fit.coefficients == pytest.approx([1.5, 0.75, 1.0])
    assert fit.identified.tolist() == [False, False, True]
    assert np.isinf(fit.stderr[:2]).all()
    assert fit.stderr[2] < 1e-6


def test_a_column_that_stands_still_says_nothing_and_costs_nothing() -> None:
    x = np.array([-1.0, 0.0, 1.0])
    fit = regress(np.stack([x, np.full(3, 0.1)], axis=1), np.array([[1.0], [0.0], [3.0]]))
    assert fit.coefficients == pytest.approx([1.0, 0.0])
    assert fit.stderr == pytest.approx([math.sqrt(4 / 3), math.inf])


@pytest.mark.parametrize("replica_noise", [False, True])
@pytest.mark.parametrize("batches", [1, 2, 3])
@pytest.mark.parametrize("n", [4, 6])
def test_it_is_what_the_formulas_say(n: int, batches: int, replica_noise: bool) -> None:
    draw = np.random.default_rng(n)
    x, losses = draw.normal(size=(n, 2)), draw.normal(size=(n, batches))
    design, left = np.hstack([x, np.ones((n, 1))]), n - 3
    each = (np.linalg.pinv(design) @ losses)[:2]
    residuals = losses - design @ np.linalg.pinv(design) @ losses
    of_batches, of_replicas = np.zeros(2), np.zeros(2)
    if batches > 1:
        of_batches = each.var(axis=1, ddof=1) / batches
    if batches == 1 or replica_noise:
        scatter = (residuals.mean(axis=1) ** 2).sum() / left
        if batches > 1:
            scatter = max(scatter - residuals.var(axis=1, ddof=1).sum() / left / batches, 0.0)
        of_replicas = scatter * np.diag(np.linalg.inv(design.T @ design))[:2]
    variance = of_batches + of_replicas
    freedoms = variance**2 / (of_batches**2 / max(batches - 1, 1) + of_replicas**2 / left)
    fit = regress(x, losses, replica_noise=replica_noise)
    assert fit.coefficients == pytest.approx(each.mean(axis=1))
    assert fit.stderr == pytest.approx(np.sqrt(variance))
    if batches > 1 and not replica_noise:
        assert np.array(fit.by_sub_batch) == pytest.approx(each)
        assert fit.freedom(0) is None
    else:
        assert fit.slopes(0) == ()
        assert [fit.freedom(0), fit.freedom(1)] == pytest.approx(freedoms)


def test_the_minimum_norm_is_in_units_of_each_columns_deviation() -> None:
    draw = np.random.default_rng(0)
    x, losses = draw.exponential(size=(6, 2)), draw.normal(size=(6, 1))
    x = np.hstack([x, 10.0 * x.sum(axis=1, keepdims=True)])
    units = (x - x.mean(axis=0)) / x.std(axis=0)
    expected = np.linalg.pinv(units) @ (losses - losses.mean())
    assert regress(x, losses).coefficients == pytest.approx(expected[:, 0] / x.std(axis=0))


def placebo_t(draw: np.random.Generator, *, batches: int, slopes: float, replicas: float, each: float) -> Array:
    """t of a placebo knob in 1500 windows of N = 16, K = 3, its neighbours having effects.

    Noise: every sub-batch has slopes of its own (sd `slopes`), every replica an offset common to all
    sub-batches (sd `replicas`), every pair of them its own (sd `each`).
    """
    found = []
    for _ in range(1500):
        x = draw.choice([-0.5, 0.5], (16, 3))
        loss = x @ np.array([[1.0], [-2.0], [0.0]]) + x @ draw.normal(0, slopes, (3, batches))
        loss = loss + draw.normal(0, replicas, (16, 1)) + draw.normal(0, each, (16, batches))
        fit = regress(x, loss, replica_noise=replicas > 0)
        found.append(fit.coefficients[2] / fit.stderr[2])
    return np.array(found)


@pytest.mark.parametrize(
    ("batches", "slopes", "replicas", "each", "freedom"),
    [
        (1, 0.0, 0.0, 1.0, 12),  # residual errors
        (8, 1.0, 0.0, 0.0, 7),  # shared gradients: replicas on a line, residuals vanish
        (8, 1.0, 0.0, 1.0, 7),
        (8, 0.0, 1.0, 0.0, 12),  # local gradients: sub-batches agree about a replica that is merely lucky
        (8, 1.0, 0.3, 0.3, 7),
        (8, 0.0, 1e-9, 1.0, 9),  # nothing is counted twice; freedom in between
    ],
)
def test_the_t_of_a_placebo_is_a_t(batches: int, slopes: float, replicas: float, each: float, freedom: int) -> None:
    t = placebo_t(np.random.default_rng(7), batches=batches, slopes=slopes, replicas=replicas, each=each)
    claimed = math.sqrt(freedom / (freedom - 2))
    assert t.std() == pytest.approx(claimed, rel=0.1)
    assert abs(t.mean()) < 0.12


@pytest.mark.parametrize(
    ("n", "batches", "replicas", "each", "passes"),
    [
        (4, 1, 1.0, 0.0, 0.05),  # residuals alone, N - K - 1 = 2 degrees of freedom: t alone passes in 18 %
        (8, 4, 1.0, 0.01, 0.05),  # replicas that are merely lucky
        (4, 8, 0.3, 1.0, 0.06),  # both
        (8, 8, 0.0, 1.0, 0.05),  # sub-batches alone
    ],
)
def test_an_error_tells_its_degrees_of_freedom(
    n: int, batches: int, replicas: float, each: float, passes: float
) -> None:
    """So that a gate is passed about as often by few as by many."""
    draw, gate = np.random.default_rng(0), 1.96
    noisy = batches > 1
    for estimator in (LeastSquares(replica_noise=noisy), Marginal(replica_noise=noisy)):
        passed, passed_by_t = [], []
        for _ in range(2000):
            losses = replicas * draw.normal(0, 1, (n, 1)) + each * draw.normal(0, 1, (n, batches))
            levels = np.resize([-0.5, 0.5], (n, 1))
            comparison = Comparison(levels=levels, losses=losses, shifts=np.zeros(1), valid=np.ones(n))
            (told,), _ = estimator.estimate(estimator.start(1), comparison)
            passed.append(abs(told.slope / told.normal_stderr) > gate)
            passed_by_t.append(abs(told.t) > gate)
        assert np.mean(passed) == pytest.approx(passes, abs=0.025)
        assert np.mean(passed_by_t) > np.mean(passed) + 0.03


def test_of_sub_batches_the_slopes_tell_it() -> None:
    x, losses = np.array([[-0.5], [0.5], [-0.5], [0.5]]), np.random.default_rng(0).normal(size=(4, 3))
    comparison = Comparison(levels=x, losses=losses, shifts=np.zeros(1), valid=np.ones(4))
    (told,), _ = LeastSquares().estimate(LeastSquares().start(1), comparison)
    assert (len(told.slopes), told.freedom) == (3, None)


def test_sub_batches_alone_would_trust_a_lucky_replica() -> None:
    # What `replica_noise` is for: without it the error of this fit is 0.
    draw = np.random.default_rng(0)
    x = draw.choice([-0.5, 0.5], (16, 1))
    loss = np.repeat(draw.normal(0, 1, (16, 1)), 8, axis=1)
    assert regress(x, loss).stderr[0] < 1e-12
    assert regress(x, loss, replica_noise=True).stderr[0] > 0.1


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("correlated", [0.0, 0.9])
def test_very_many_replicas_tell_what_few_would(
    batches: int, correlated: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the normal equations and by decomposition, the same numbers but for rounding."""
    draw = np.random.default_rng(0)
    x = draw.choice([-0.5, 0.5], (regression.MANY, 3)) + draw.normal(0, 0.1, (regression.MANY, 3))
    x[:, 1] += correlated * (x[:, 0] - x[:, 1])
    losses = 2.0 + x @ draw.normal(0, 1, (3, batches)) + draw.normal(0, 1, (regression.MANY, batches))
    equations = regress(x, losses, replica_noise=True)
    monkeypatch.setattr(regression, "MANY", len(x) + 1)
    decomposed = regress(x, losses, replica_noise=True)
    assert equations.coefficients == pytest.approx(decomposed.coefficients, rel=1e-10)
    assert equations.stderr == pytest.approx(decomposed.stderr, rel=1e-10)
    assert equations.identified.tolist() == decomposed.identified.tolist() == [True] * 3


def test_very_many_replicas_with_aliased_columns_are_decomposed() -> None:
    x = np.tile([-1.0, 1.0, -1.0, 1.0], regression.MANY // 4)
    other = np.tile([-1.0, -1.0, 1.0, 1.0], regression.MANY // 4)
    fit = regress(np.stack([x, 2 * x, other], axis=1), (3 * x + other)[:, None])
    assert fit.coefficients == pytest.approx([1.5, 0.75, 1.0])
    assert fit.identified.tolist() == [False, False, True]
