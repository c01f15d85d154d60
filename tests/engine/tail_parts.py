"""Runs that end with a mean of their weights, on the small problem of all tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hdet
from hdet import Engine, TailAverage
from hdet.controllers import Hold
from hdet.replicas import tensors

WINDOW, TOTAL = 4, 20
PARTS = ((4, 8), (8, 16), (16, 20))
"""Of `TailAverage()` in so many steps."""
PART = ("start", "stop", "steps", "flags", "values")
"""What a state has of each."""
CALM, RESTLESS, WILD = 0.02, 0.15, 0.2
"""Rates at which the last weights are still on their way, and at which they are those of the last few batches."""


def engine_of(
    problem: Any, rate: float = RESTLESS, *middle: nn.Module, n: int = 1, copies: bool = False, **options: Any
) -> Engine:
    model = problem.model(*middle)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    home = (hdet.replicate if copies else hdet.micro_batches)(model, optimizer, n=n)
    knobs = options.pop("knobs", [hdet.LearningRate(evidence=hdet.evidence.Line(), controller=Hold())])
    given = {"window": WINDOW, "signal": problem.probe(), "total_steps": TOTAL, "tail": TailAverage(), **options}
    return Engine(home, knobs, **given)


def weights_of(engine: Engine, host: int = 0) -> list[Tensor]:
    return tensors.clones(tensors.parameters(engine.hosts[host][0]))


def noisy(step: int, index: int) -> tuple[Tensor, Tensor]:
    """Eight examples with so much noise that a step in ten goes the wrong way."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    x = torch.randn(8, 4, generator=generator)
    return x, x.sum(dim=1, keepdim=True) + 3.0 * torch.randn(8, 1, generator=generator)


def walked(engine: Engine, train: Any, until: int | None = None, **options: Any) -> list[list[Tensor]]:
    """Train; the weights after each update."""
    path: list[list[Tensor]] = []
    train(engine, until, batch=noisy, after_update=lambda step: path.append(weights_of(engine)), **options)
    return path


def mean(path: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(same).double().mean(dim=0).float() for same in zip(*path, strict=True)]


def mixed(told: dict[str, Any], path: list[list[Tensor]]) -> list[Tensor]:
    """The weights that a record tells of, from those after each update."""
    shares = [told["last"], *(part["share"] for part in told["parts"])]
    weights = [path[-1], *(mean(path[part["start"] : part["stop"]]) for part in told["parts"])]
    assert sum(shares) == pytest.approx(1.0)
    return [
        torch.stack([s * w for s, w in zip(shares, same, strict=True)]).sum(dim=0)
        for same in zip(*weights, strict=True)
    ]


def close(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.allclose(*pair, atol=1e-6) for pair in zip(some, others, strict=True))


def held_out(problem: Any, engine: Engine, weights: list[Tensor]) -> np.ndarray[Any, Any]:
    """[J] losses of the probe at some weights."""
    with tensors.substituted(tensors.parameters(engine.hosts[0][0]), weights):
        losses: np.ndarray[Any, Any] = problem.probe().measure(engine.hosts[0][0], 0).numpy()
        return losses
