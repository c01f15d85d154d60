"""The lowest point of a quadratic on shares, known at corners and half-way between them."""

from __future__ import annotations

import math
import warnings
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from hdet.engine.mixture import lowest, nodes
from hdet.engine.tail import TailMean, mixed


def losses_of(form: np.ndarray[Any, Any], of: list[int]) -> dict[tuple[int, int], float]:
    size = len(form)
    return {pair: float(shares @ form @ shares) for pair, shares in nodes(of, size).items()}


def quadratic(seed: int, size: int = 3) -> np.ndarray[Any, Any]:
    """One with its lowest point inside, on a side or at a corner, or with several."""
    form = np.random.default_rng(seed).normal(size=(size, size))
    return form + form.T


@pytest.mark.parametrize("seed", range(12))
def test_no_point_of_a_fine_grid_lies_lower(seed: int) -> None:
    form = quadratic(seed)
    shares, value = lowest([0, 1, 2], losses_of(form, [0, 1, 2]), 3)
    assert value == pytest.approx(float(shares @ form @ shares))
    assert shares.min() >= 0.0
    assert shares.sum() == pytest.approx(1.0)
    grid = [at for at in product(np.linspace(0, 1, 101), repeat=3) if abs(sum(at) - 1) < 1e-9]
    assert value <= min(float(np.array(at) @ form @ np.array(at)) for at in grid) + 1e-9


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("pair", [(1, 1), (0, 1), (1, 2)])
@pytest.mark.parametrize("seed", range(6))
def test_a_loss_that_is_not_finite_rules_out_its_faces_alone(bad: float, pair: tuple[int, int], seed: int) -> None:
    losses = losses_of(quadratic(seed), [0, 1, 2])
    whole = [[0, 2], [0, 1], [1, 2], [0], [1], [2]]
    sound = [of for of in whole if pair not in nodes(of, 3)]
    expected = min(lowest(of, losses, 3)[1] for of in sound)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shares, value = lowest([0, 1, 2], losses | {pair: bad}, 3)
    assert value == pytest.approx(expected)
    assert [k for k in range(3) if shares[k]] in sound


def test_what_has_no_share_may_not_be_finite() -> None:
    last = [torch.tensor([1.0, 2.0])]
    part = TailMean(0, [True], last)
    part.take([torch.tensor([math.nan, math.inf])], 4, 4)
    (mean,) = mixed(np.array([1.0, 0.0]), last, [part])
    assert torch.equal(mean, last[0])
