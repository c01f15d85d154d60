"""Runs with a learning rate for each group, of a small classifier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import hdet

STEPS = 60


PATTERNS = {"head": "2.*", "biases": "*bias"}


def build(
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, width: int = 8, **options: Any
) -> tuple[nn.Sequential, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))
    return model, optimizer(model.parameters(), **{"lr": 3e-3, **options})


def examples(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(32, 4, generator=generator)
    return inputs, inputs[:, :3].argmax(1)


PROBE = hdet.Probe(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), [examples(-j) for j in range(1, 9)])


def attach(model: nn.Module, optimizer: Any, **options: Any) -> hdet.Search:
    options = {"probe": PROBE, "total_steps": STEPS, "rates": PATTERNS, "window": 5, "quiet": True, **options}
    return hdet.attach(model, optimizer, exclude=["weight_decay"], **options)


def train(model: nn.Module, optimizer: Any, search: hdet.Search | None, start: int = 0, stop: int = STEPS) -> None:
    for step in range(start, stop):
        inputs, labels = examples(step)
        loss = F.cross_entropy(model(inputs), labels)
        (loss if search is None else search.loss(loss)).backward()
        optimizer.step()
        optimizer.zero_grad()


def groups_in_a_step(optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> list[dict[str, Any]]:
    """What the optimizer steps by."""
    seen: list[dict[str, Any]] = []
    hook = optimizer.register_step_pre_hook(lambda *_: seen.extend(map(dict, optimizer.param_groups)))
    step()
    hook.remove()
    return seen


def names_by_group(model: nn.Module, groups: list[dict[str, Any]]) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in groups]
