"""GRAWA against a transcription in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import hdet
from hdet.contrib import Grawa
from hdet.contrib.grawa import inverse
from hdet.errors import CheckpointError, ConfigError
from hdet.merges import Mean, Merge

N, WINDOW, TOTAL = 3, 4, 8
Array = NDArray[np.float64]


def model_of() -> nn.Module:
    """y = b x W + c in two layers without anything between, so that its gradients are short to write."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))


def engine_of(problem: Any, merge: Merge, **options: Any) -> hdet.Engine:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    objective = hdet.Objective(problem.loss, lambda window: [problem.batch(100 + window, j) for j in range(2)])
    settings = {"window": WINDOW, "gradients": "local", "total_steps": TOTAL, "objective": objective, **options}
    return hdet.Engine(hdet.replicate(model, optimizer, n=N), [], merge=merge, **settings)


def gradient(theta: list[Array], x: Array, y: Array) -> list[Array]:
    """Of mean (W2 (W1 x + b1) + b2 - y)^2 in W1, b1, W2, b2."""
    w1, b1, w2, b2 = theta
    hidden = x @ w1.T + b1
    error = 2 * (hidden @ w2.T + b2 - y) / len(x)
    back = error @ w2
    return [back.T @ x, back.sum(axis=0), error.T @ hidden, error.sum(axis=0)]


def transcribed(thetas: list[list[Array]], norms: Array, batches: Any, b: float, window: int, by: list[int]) -> Any:
    """The authors' update: smoothed norms, their debiased inverse, normalised; then the weighted sum."""
    now = np.zeros_like(norms)
    for r, theta in enumerate(thetas):
        total = [sum(parts) for parts in zip(*(gradient(theta, *batch) for batch in batches), strict=True)]
        for layer, part in zip(by, total, strict=True):
            now[r, layer] += (part**2).sum()
    norms = b * norms + (1 - b) * np.sqrt(now)
    raw = 1 / (norms / (1 - b ** (window + 1)))
    weights = raw / raw.sum(axis=0)
    return [sum(weights[r, layer] * thetas[r][p] for r in range(N)) for p, layer in enumerate(by)], norms


@pytest.mark.parametrize(("layers", "by"), [(False, [0, 0, 0, 0]), (True, [0, 0, 1, 1])])
@pytest.mark.parametrize("momentum", [0.0, 0.43])
def test_it_is_the_transcription(layers: bool, by: list[int], momentum: float, problem: Any, train: Any) -> None:
    engine = engine_of(problem, Grawa(layers=layers, momentum=momentum))
    norms = np.zeros((N, max(by) + 1))
    for window in range(2):
        thetas: list[list[Array]] = []

        def after(step: int, thetas: list[list[Array]] = thetas) -> None:
            thetas[:] = [[p.detach().double().numpy().copy() for p in r.model.parameters()] for r in engine.replicas]

        train(engine, WINDOW * (window + 1), after_update=after)
        batches = [tuple(t.double().numpy() for t in problem.batch(100 + window, j)) for j in range(2)]
        expected, norms = transcribed(thetas, norms, batches, momentum, window, by)
        for parameter, value in zip(engine.replicas[0].model.parameters(), expected, strict=True):
            np.testing.assert_allclose(parameter.detach().numpy(), value, rtol=2e-5, atol=1e-6)


def test_flat_places_and_failed_replicas() -> None:
    sound, valid = np.array([True, True, False]), np.array([True, True, False])
    np.testing.assert_allclose(inverse(np.array([[0.0], [2.0], [1.0]]), sound, valid)[:, 0], [1, 0, 0], atol=1e-11)
    np.testing.assert_allclose(inverse(np.zeros((3, 1)), sound, valid)[:, 0], [0.5, 0.5, 0])
    nowhere = np.zeros(3, dtype=bool)
    np.testing.assert_allclose(inverse(np.ones((3, 1)), nowhere, valid)[:, 0], [0.5, 0.5, 0])


class Turn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.zeros((), dtype=torch.complex64))

    def forward(self, target: torch.Tensor) -> torch.Tensor:
        return (self.turn - 1j * target).abs().square()


def test_a_parameter_may_be_thawed_within_a_window(problem: Any, train: Any) -> None:
    model = model_of()
    first, *others = model.parameters()
    first.requires_grad_(False)
    replicas = hdet.replicate(model, torch.optim.SGD(others, lr=0.02), n=N)
    objective = hdet.Objective(problem.loss, lambda window: [problem.batch(100 + window, j) for j in range(2)])
    options = {"gradients": "local", "total_steps": TOTAL, "objective": objective}
    engine = hdet.Engine(replicas, [], window=WINDOW, merge=Grawa(layers=True), **options)
    train(engine, WINDOW + 1)
    for replica in engine.replicas:
        next(replica.model.parameters()).requires_grad_()
    train(engine, TOTAL)
    one, *rest = ([*replica.model.parameters()] for replica in engine.replicas)
    assert all(torch.equal(a, b) for other in rest for a, b in zip(one, other, strict=True))


def test_the_norm_of_a_complex_gradient_counts_both_parts() -> None:
    model = Turn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    objective = hdet.Objective(lambda model, target: model(target), [torch.tensor(1.0)] * 2)
    replicas = hdet.replicate(model, optimizer, n=2)
    engine = hdet.Engine(
        replicas, [], merge=Grawa(momentum=0.0), window=1, total_steps=1, gradients="local", objective=objective
    )
    losses = []
    for target, replica in zip((2.0, 6.0), engine.replicas, strict=True):
        with replica:
            losses.append(replica.model(torch.tensor(target)))
            losses[-1].backward()
    for own in engine.optimizers:
        own.step()
    engine.step(losses)
    places, weights = np.array([0.2, 0.6]), 1 / np.array([0.8, 0.4])
    assert model.turn.item() == pytest.approx(1j * (places * weights).sum() / weights.sum())


def test_the_probe_will_do_and_neither_is_refused(problem: Any, train: Any, assert_alike: Any) -> None:
    engine = engine_of(problem, Grawa(), objective=None, signal=problem.probe())
    train(engine)
    assert_alike(engine)
    with pytest.raises(ConfigError, match="Grawa weighs replicas by gradients on common batches"):
        engine_of(problem, Grawa(), objective=None)


def test_a_run_that_is_taken_up_is_the_same_run(problem: Any, train: Any) -> None:
    merge = Grawa(layers=True)
    whole, first, second = (engine_of(problem, merge) for _ in range(3))
    train(whole)
    train(first, 5)
    state = first.state_dict()
    second.load_state_dict(state)
    train(second)
    for one, other in zip(whole.replicas[0].model.parameters(), second.replicas[0].model.parameters(), strict=True):
        assert torch.equal(one, other)
    state["merge"]["state"]["norms"] = [[1.0]] * N
    with pytest.raises(CheckpointError, match="the checkpoint's gradient norms are"):
        engine_of(problem, merge).load_state_dict(state)


def test_it_leaves_training_as_it_is(problem: Any, train: Any) -> None:
    """Where weights come out alike, all else does: no gradient is left behind, no generator moved."""
    found = []
    for merge in (Grawa(), Mean()):
        engine = engine_of(problem, merge, total_steps=WINDOW)
        before = torch.get_rng_state()
        seen: list[Any] = []

        def after(step: int, engine: hdet.Engine = engine, seen: list[Any] = seen) -> None:
            seen.append([parameter.clone() for parameter in engine.replicas[1].model.parameters()])

        train(engine, after_update=after)
        assert torch.equal(before, torch.get_rng_state())
        assert all(p.grad is None for r in engine.replicas for p in r.model.parameters())
        found.append(seen)
    assert all(torch.equal(a, b) for one, other in zip(*found, strict=True) for a, b in zip(one, other, strict=True))
