"""Runs with a learning rate for each group, of a small classifier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F

import hdet
from hdet.overlay.split_groups import SplitGroups

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


def groups_in_a_step(step: Callable[[], object]) -> list[dict[str, Any]]:
    """The groups that rates go by while the optimizer steps, before those of one rate are joined."""
    seen: list[dict[str, Any]] = []

    def look(split: SplitGroups) -> None:
        seen.extend(map(dict, split._optimizer.param_groups))

    with patch.object(SplitGroups, "join", look):
        step()
    return seen


def names_by_group(model: nn.Module, groups: list[dict[str, Any]]) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in groups]
