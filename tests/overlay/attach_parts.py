"""What the tests of `hdet.attach` train: a small classifier in two parameter groups, and its held-out loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hdet
from hdet.controllers import Hold
from hdet.spreads import TwoLevel

STEPS = 40

HELD: list[hdet.Knob] = [
    hdet.LearningRate(controller=Hold()),
    hdet.WeightDecay(controller=Hold()),
    hdet.Dropout(controller=Hold(), spread=TwoLevel(0.0)),
]
"""Measured as ever and moved nowhere."""


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))


def batch(step: int, part: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + part)
    inputs = torch.randn(8, 4, generator=generator)
    return inputs, inputs[:, :3].argmax(dim=1)


def loss_of(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(given[0]), given[1])


def probe() -> hdet.Probe:
    return hdet.Probe(loss_of, [batch(-1, part) for part in range(8)])


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    first, last = list(model[0].parameters()), list(model[3].parameters())  # type: ignore[index]
    groups = [{"params": first, "lr": 3e-3, "weight_decay": 0.1}, {"params": last, "lr": 1e-3, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, **options)


def attached(model: nn.Module, optimizer: Any, **options: Any) -> hdet.Search:
    options.setdefault("total_steps", STEPS)
    return hdet.attach(model, optimizer, probe=probe(), window=5, quiet=True, **options)


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any = None,
    search: hdet.Search | None = None,
    *,
    start: int = 0,
    stop: int = STEPS,
    parts: Callable[[int], int] = lambda step: 1,
) -> None:
    """The user's, which knows of hdet no more than to say what the loss is."""
    for step in range(start, stop):
        count = parts(step)
        for part in range(count):
            loss = loss_of(model, batch(step, part))
            if search is not None:
                loss = search.loss(loss)
            (loss / count).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()


def explicit(
    engine: hdet.Engine,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    compute: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor] = loss_of,
) -> None:
    """The loop written for the engine."""
    for step in range(engine.step_count, STEPS):
        losses = []
        for replica in engine.replicas:
            with replica:
                loss = compute(model, batch(step, replica.index))
                loss.backward()
            losses.append(loss.detach())
        engine.share_gradients()
        optimizer.step()
        optimizer.zero_grad()
        engine.step(losses)
