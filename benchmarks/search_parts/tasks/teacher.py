"""Classes drawn from a random network's opinion, learnt by another network with SGD."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.nn import Dropout
from search_parts.examples import DrawnProblem, DrawnTask
from search_parts.task import ALL_OFF, DECAYS, DROPOUTS, LEARNING_RATES, Grid, doubling

INPUTS, TEACHER, STUDENT, CLASSES = 12, 32, 96, 6
SIZES = {"train": 1500, "probe": 500, "test": 3000}
Examples = tuple[Tensor, Tensor]


@lru_cache(maxsize=1)
def examples() -> dict[str, Examples]:
    """(inputs [n, 12], class [n]) of each split, the same for every seed.

    Inputs are normal; a class is drawn from the softmax of a network with one hidden layer of 32 tanh units whose
    weights are normal, of variance 1 / inputs and 9 / hidden.
    """
    rng = np.random.default_rng(20190606)
    inputs = rng.standard_normal((sum(SIZES.values()), INPUTS))
    hidden = np.tanh(inputs @ rng.standard_normal((INPUTS, TEACHER)) / math.sqrt(INPUTS))
    logits = hidden @ rng.standard_normal((TEACHER, CLASSES)) * 3 / math.sqrt(TEACHER)
    classes = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    columns = (torch.from_numpy(inputs).float(), torch.from_numpy(classes))
    parts = zip(*(torch.split(column, list(SIZES.values())) for column in columns), strict=True)
    return dict(zip(SIZES, parts, strict=True))


class Student(nn.Module):
    """Two hidden layers of ReLU and dropout."""

    def __init__(self, dropout: float, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(INPUTS, width),
            nn.ReLU(),
            Dropout(dropout),
            nn.Linear(width, width),
            nn.ReLU(),
            Dropout(dropout),
            nn.Linear(width, CLASSES),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """[batch, inputs] to logits [batch, classes]."""
        return self.layers(inputs)  # type: ignore[no-any-return]


class TeacherProblem(DrawnProblem):
    """The generated examples."""

    splits = examples
    network = Student

    def example_losses(self, model: nn.Module, batch: Examples) -> Tensor:
        inputs, classes = batch
        return F.cross_entropy(model(inputs), classes, reduction="none")


TASK = DrawnTask(
    name="teacher",
    title="Classes drawn by a random teacher (SGD with momentum)",
    steps=1000,
    batch=64,
    family="sgd",
    ignorance=math.log(CLASSES),
    grid=Grid(doubling(0.00125, 8), (1e-3, 3e-3, 1e-2, 3e-2), (0.0, 0.2, 0.4)),
    starts=LEARNING_RATES + DECAYS + DROPOUTS + ALL_OFF,
    micro_batches=4,
    shorter=4,
    development=True,
    problems=TeacherProblem,
    width=STUDENT,
)
