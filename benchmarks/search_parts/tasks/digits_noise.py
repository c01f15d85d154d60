"""Handwritten digits, a fifth of the labels wrong, SGD: learning rate, decay and dropout all matter."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.tasks import Digits
from search_parts.task import DECAYS, DROPOUTS, LEARNING_RATES, NINE, Grid, Problem, Task, doubling

Examples = tuple[Tensor, Tensor]
PROBE_EXAMPLES = 16  # times 8 sub-batches: as large as a training batch


class DigitsProblem(Problem):
    """`hdet.tasks.Digits` for one seed."""

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


class DigitsTask(Task):
    """A perceptron on noisy digits."""

    def problem(self, seed: int, dropout: float) -> DigitsProblem:
        digits = Digits(label_noise=0.2, dropout=dropout, probe_batches=self.sub_batches, probe_examples=PROBE_EXAMPLES)
        return DigitsProblem(digits, seed=seed, batch=self.batch)


TASK = DigitsTask(
    name="digits_noise",
    title="Digits with label noise (SGD with momentum)",
    steps=1000,
    batch=128,
    family="sgd",
    ignorance=math.log(10),
    grid=Grid(doubling(0.0125, 6), (1e-3, 3e-3, 1e-2, 3e-2), (0.0, 0.15, 0.3, 0.5)),
    starts=LEARNING_RATES + DECAYS + DROPOUTS + NINE,
    micro_batches=8,
    shorter=2,
    development=True,
)
