"""Weights by the signal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hdet
from hdet.contrib import Weighted
from hdet.contrib.weighted import by_signal
from hdet.errors import ConfigError
from hdet.merges import Merge

LOSSES = st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(float("nan"))), min_size=1, max_size=9)
TEMPERATURES = st.one_of(st.none(), st.floats(0, 10))


@settings(max_examples=200)
@given(losses=LOSSES, temperature=TEMPERATURES, trim=st.floats(0, 0.99), seed=st.integers(0, 99))
def test_weights_are_shares_whatever_the_order(
    losses: list[float], temperature: float | None, trim: float, seed: int
) -> None:
    given_losses = np.array(losses)
    weights = by_signal(given_losses, temperature, trim)
    if weights is None:
        assert not np.isfinite(given_losses).any()
        return
    assert weights.sum() == pytest.approx(1.0)
    assert (weights >= 0).all()
    assert not weights[np.isnan(given_losses)].any()
    order = np.random.default_rng(seed).permutation(len(losses))
    permuted = by_signal(given_losses[order], temperature, trim)
    assert permuted is not None
    np.testing.assert_allclose(permuted, weights[order], rtol=1e-12, atol=0)
    best = weights[given_losses == np.nanmin(given_losses)]
    assert (best == weights.max()).all()


def test_exact_numbers() -> None:
    losses = np.array([1.0, 2.0, 4.0, np.nan])
    sd = np.std([1.0, 2.0, 4.0])
    raw = np.exp(-np.array([0.0, 1.0, 3.0]) / (0.5 * sd))
    np.testing.assert_allclose(by_signal(losses, 0.5), [*(raw / raw.sum()), 0.0])
    np.testing.assert_array_equal(by_signal(losses, 0.0), [1, 0, 0, 0])
    np.testing.assert_array_equal(by_signal(losses, None, trim=0.34), [0.5, 0.5, 0, 0])
    np.testing.assert_array_equal(by_signal(np.array([2.0, 1.0, 1.0]), 0.0), [0, 0.5, 0.5])
    assert by_signal(np.array([np.nan, np.inf]), 1.0) is None


def test_a_share_that_rounding_left_below_a_whole_number_is_that_number() -> None:
    losses = np.arange(10.0)
    np.testing.assert_array_equal(by_signal(losses, None, trim=1.0 - 0.9), by_signal(losses, None, trim=0.1))
    weights = by_signal(losses, None, trim=np.nextafter(1.0, 0.0))
    assert weights is not None
    assert weights.tolist() == [1.0] + [0.0] * 9


def test_declared_in_every_way() -> None:
    declared = {"kind": "weighted", "temperature": None, "trim": 0.25}
    assert Merge.from_dict(declared) == Weighted(None, trim=0.25)
    with pytest.raises(ConfigError, match="trim"):
        Weighted(trim=1.0)


def engine_of(problem: Any, merge: Merge, **options: Any) -> hdet.Engine:
    model = problem.model(torch.nn.BatchNorm1d(6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    replicas = hdet.replicate(model, optimizer, n=4)
    return hdet.Engine(replicas, [], window=3, merge=merge, gradients="local", total_steps=6, **options)


def held(engine: hdet.Engine) -> list[dict[str, torch.Tensor]]:
    return [{k: v.clone() for k, v in replica.model.state_dict().items()} for replica in engine.replicas]


@pytest.mark.parametrize("signal", ["training loss", "probe"])
def test_the_best_replica_is_taken_whole(signal: str, problem: Any, train: Any, assert_alike: Any) -> None:
    """Its weights, its statistics and its optimizer's state, by the loss that the engine compares by."""
    probe = problem.probe() if signal == "probe" else None
    engine = engine_of(problem, Weighted(0.0), signal=probe)
    before: list[Any] = []
    probed: list[float] = []

    def after(step: int) -> None:
        before[:] = [*held(engine)]
        moments[:] = [o.state[o.param_groups[0]["params"][0]]["exp_avg"].clone() for o in engine.optimizers]
        if probe is not None:
            probed[:] = [float(probe.measure(replica.model, 0).mean()) for replica in engine.replicas]

    moments: list[torch.Tensor] = []
    (record,) = train(engine, 3, after_update=after)
    best = int(np.argmin(probed or record.losses))
    assert_alike(engine)
    for name, value in engine.replicas[0].model.state_dict().items():
        if value.is_floating_point():
            assert torch.equal(value, before[best][name]), name
    for optimizer in engine.optimizers:
        assert torch.equal(optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"], moments[best])


def test_weights_are_of_the_mean(problem: Any, train: Any, assert_alike: Any) -> None:
    engine = engine_of(problem, Weighted(0.7))
    before: list[Any] = []
    (record,) = train(engine, 3, after_update=lambda step: before.__setitem__(slice(None), held(engine)))
    weights = by_signal(np.array(record.losses), 0.7)
    assert weights is not None
    assert_alike(engine)
    for name, value in engine.replicas[0].model.state_dict().items():
        if value.is_floating_point():
            expected = sum(w * own[name].double() for w, own in zip(weights.tolist(), before, strict=True))
            torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)


def test_without_losses_it_is_the_mean(problem: Any, train: Any) -> None:
    found = []
    for merge in (Weighted(0.0), hdet.merges.Mean()):
        engine = engine_of(problem, merge)
        train(engine, report=lambda step, losses: None)
        found.append(held(engine)[0])
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
