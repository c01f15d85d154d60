"""The same small training for every home of replicas: model, data, loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

import hdet
from hdet.controllers import Gated
from hdet.spreads import TwoLevel

WIDTH = 6


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 1))


def batch_normed(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.05, foreach=False)


def chained_of(model: nn.Module) -> torch.optim.Optimizer:
    """Whose states have other entries for the first parameter than for the rest."""
    first, *rest = model.parameters()
    return hdet.ChainedOptimizer(
        torch.optim.SGD([first], lr=0.02, momentum=0.9, foreach=False),
        torch.optim.AdamW(rest, lr=0.02, weight_decay=0.1, foreach=False),
    )


def batch(step: int, replica: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * replica + step)
    inputs = torch.randn(size, WIDTH, generator=generator)
    return inputs, inputs.sin().sum(dim=1, keepdim=True) + 0.1 * torch.randn(size, 1, generator=generator)


def loss_of(model: nn.Module, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = given
    return (model(inputs) - targets).square().mean()


def probe(at: str = "last") -> hdet.Probe:
    return hdet.Probe(loss_of, [batch(-1 - j, 99) for j in range(4)], at=at)  # type: ignore[arg-type]


def knobs() -> list[hdet.Knob]:
    return [
        hdet.LearningRate(controller=Gated(gate=0.0), spread=TwoLevel(0.3)),
        hdet.WeightDecay(controller=Gated(gate=0.0), spread=TwoLevel(0.5)),
    ]


def train(engine: hdet.Engine, steps: int, *, parts: Sequence[int] = (0,), each: int = 1) -> None:
    """Train; a replica's batch at a step is `each` batches, of which this rank takes `parts`."""
    for step in range(engine.step_count, steps):
        losses = []
        for replica in engine.replicas:
            with replica:
                total = torch.zeros(())
                for part in parts:
                    loss = loss_of(replica.model, batch(step, replica.index * each + part)) / len(parts)
                    loss.backward()
                    total = total + loss.detach()
            losses.append(total)
        engine.share_gradients()
        for optimizer in engine.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        engine.step(losses)


def told(engine: hdet.Engine) -> list[dict[str, Any]]:
    """The history without its clock."""
    records = [asdict(record) for record in engine.history]
    for record in records:
        del record["seconds"], record["closing"]
    return records


def weights(engine: hdet.Engine) -> list[list[torch.Tensor]]:
    """The full parameters of each model here."""
    found = []
    for model, _ in engine.hosts:
        found.append([_full(p.detach()).clone() for p in model.parameters()])
    return found


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def difference(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))
