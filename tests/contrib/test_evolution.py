"""Evolution strategies: Gaussian antithetic levels, ranked losses, Adam."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import hdet
from hdet.contrib import Adam, Antithetic, EvolutionStrategy, Gaussian, Marginal
from hdet.contrib.evolution import centred_ranks
from hdet.controllers import Context, Controller, Estimate, HeavyBall
from hdet.controllers.state import NoState
from hdet.designs import Design, Hadamard
from hdet.errors import ConfigError
from hdet.estimators import Comparison, LeastSquares
from hdet.spreads import OneSided, Spread, TwoLevel

Array = NDArray[np.float64]
NAMES = ["a", "b", "c"]
SLOPES = np.array([0.7, -0.3, 0.0])
HESSIAN = np.array([[4.0, 1.0, -2.0], [1.0, 2.0, 0.5], [-2.0, 0.5, 8.0]])


def drawn(design: Design, spread: Spread, n: int, window: int) -> Array:
    return design.assign([spread.levels(n)] * 3, seed=1, window=window, names=NAMES, two_level=[spread.two_level] * 3)


def quadratic(z: Array) -> Array:
    values: Array = 2.0 + z @ SLOPES + 0.5 * np.einsum("nk,kj,nj->n", z, HESSIAN, z)
    return values


def slopes(estimator: Any, z: Array, losses: Array) -> Array:
    found, _ = estimator.estimate(NoState(), Comparison(z, losses, np.zeros(3), np.ones(len(z))))
    return np.array([estimate.slope for estimate in found])


@pytest.mark.parametrize("n", [4, 8, 9])
@pytest.mark.parametrize("spread", [Gaussian(0.5), TwoLevel(0.5)])
def test_unbiased_on_a_quadratic(spread: Spread, n: int) -> None:
    """Over windows the mean slope is the gradient at the base, curvature and products of knobs or not."""
    windows = 600
    found = np.array(
        [
            slopes(EvolutionStrategy(ranks=False), z, quadratic(z))
            for z in (drawn(Antithetic(), spread, n, window) for window in range(windows))
        ]
    )
    error = found.std(axis=0, ddof=1) / np.sqrt(windows)
    assert (np.abs(found.mean(axis=0) - SLOPES) < 4 * error + 1e-9).all()


def test_what_is_even_about_the_base_cancels_in_every_window() -> None:
    for window in range(20):
        z = drawn(Antithetic(), Gaussian(0.5), 8, window)
        even = slopes(EvolutionStrategy(ranks=False), z, 0.5 * np.einsum("nk,kj,nj->n", z, HESSIAN, z))
        np.testing.assert_allclose(even, 0.0, atol=1e-12)
        np.testing.assert_array_equal(z[0::2], -z[1::2])


def test_the_two_level_design_is_its_special_case() -> None:
    """Orthogonal signs in mirrored pairs: the same numbers from evolution strategies and from least squares."""
    z = drawn(Hadamard(foldover=True), TwoLevel(0.5), 8, 0)
    losses = quadratic(z)
    by_strategy = slopes(EvolutionStrategy(ranks=False), z, losses)
    np.testing.assert_allclose(by_strategy, slopes(LeastSquares(), z, losses), atol=1e-12)
    np.testing.assert_allclose(by_strategy, slopes(Marginal(), z, losses), atol=1e-12)
    np.testing.assert_allclose(by_strategy, SLOPES, atol=1e-12)


def test_levels_have_the_mean_square_of_their_width() -> None:
    for n in (2, 3, 8, 33):
        assert np.sqrt((Gaussian(0.3).levels(n) ** 2).mean()) == pytest.approx(0.3)
    # Near normal: the kurtosis of many is next to 3, of two levels 1.
    many = Gaussian(1.0).levels(2000)
    assert (many**4).mean() == pytest.approx(3.0, rel=0.05)


def test_ranks_are_moved_by_no_outlier() -> None:
    np.testing.assert_array_equal(centred_ranks(np.array([5.0, 1e9, -2.0])), [0.0, 0.5, -0.5])
    z = drawn(Antithetic(), Gaussian(0.5), 8, 0)
    losses = quadratic(z)
    before = slopes(EvolutionStrategy(), z, losses)
    losses[losses.argmax()] *= 1e6
    np.testing.assert_array_equal(slopes(EvolutionStrategy(), z, losses), before)


def test_levels_that_are_not_symmetric_are_refused() -> None:
    with pytest.raises(ConfigError, match="not symmetric about its base"):
        Antithetic().assign([np.array([-0.1, -0.1, 0.2])], seed=0, window=0, names=["a"], two_level=[False])
    assert Antithetic().assign([OneSided(0.2).levels(4)], seed=0, window=0, names=["a"], two_level=[True]).any()


@pytest.mark.parametrize(
    ("rule", "theirs"),
    [
        (Adam(0.05), partial(torch.optim.Adam, lr=0.05, betas=(0.9, 0.99))),
        (HeavyBall(beta=0.0, rate=0.05), partial(torch.optim.SGD, lr=0.05)),
    ],
    ids=["Adam", "SGD"],
)
def test_the_step_is_torchs(rule: Controller, theirs: Any) -> None:
    parameter = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = theirs([parameter])
    state, place = rule.start(), 0.0
    for slope in (0.3, -0.1, 2.0, 0.0, 0.5):
        parameter.grad = torch.tensor([slope], dtype=torch.float64)
        optimizer.step()
        move, state = rule.step(state, Estimate(slope=slope, stderr=1.0), Context())
        place += move
        assert place == pytest.approx(float(parameter.detach()), abs=1e-12)


@pytest.mark.parametrize("rule", [Adam(0.2), HeavyBall(beta=0.0, rate=0.2)], ids=["Adam", "SGD"])
def test_a_rate_is_found(rule: Controller, problem: Any, train: Any) -> None:
    """From a tenth of a good rate the whole of it moves a run's base up."""
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    evidence = hdet.evidence.Divergent(design=Antithetic(), estimator=EvolutionStrategy())
    knob = hdet.LearningRate(spread=Gaussian(0.3), evidence=evidence, controller=rule)
    engine = hdet.Engine(
        hdet.replicate(model, optimizer, n=4), [knob], window=5, signal=problem.probe(), total_steps=60
    )
    train(engine)
    assert engine.bases["learning_rate"] > 0.01
