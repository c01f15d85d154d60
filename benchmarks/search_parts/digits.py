"""Handwritten digits, as the benchmark's image tasks share them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.app.tasks import Digits
from search_parts.task import Problem

Examples = tuple[Tensor, Tensor]


class DigitsProblem(Problem):
    """`hdet.app.tasks.Digits` for one seed."""

    def __init__(self, digits: Digits, *, seed: int, batch: int) -> None:
        self.workload = digits.build(seed=seed, batch_size=batch)

    def model(self) -> nn.Module:
        return self.workload.model()

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        return self.workload.groups(model)

    def batch(self, step: int) -> Examples:
        return self.workload.batch(step, 0)

    def loss(self, model: nn.Module, batch: Examples) -> Tensor:
        return self.workload.loss(model, batch)

    def probe(self, window: int) -> Examples:
        pixels, labels = zip(*self.workload.probe(window), strict=True)
        return torch.cat(pixels), torch.cat(labels)

    def example_losses(self, model: nn.Module, batch: Examples) -> Tensor:
        pixels, labels = batch
        return F.cross_entropy(model(pixels), labels, reduction="none")

    def test_loss(self, model: nn.Module) -> float:
        return self.workload.test_loss(model)
