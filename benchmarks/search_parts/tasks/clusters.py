"""Noisy points about ten centres, most of them seen once, by AdamW: after the README's example, and from its start.

Unlike there, biases do not decay, beta2 is 0.95, each probe is a fresh batch, and there are four micro-batches.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.nn import Dropout
from search_parts.examples import DrawnProblem, DrawnTask
from search_parts.task import ALL_OFF, DECAYS, LEARNING_RATES, Grid, Setting, Start, doubling

INPUTS, HIDDEN, CLASSES = 20, 32, 10
NOISE = 2.0  # standard deviation; that of the centres is 1
SIZES = {"train": 50_000, "probe": 5000, "test": 5000}
Points = tuple[Tensor, Tensor]


@lru_cache(maxsize=1)
def points() -> dict[str, Points]:
    """(point [n, 20], class [n]) of each split, the same for every seed; centres are normal."""
    generator = torch.Generator().manual_seed(20240428)
    centres = torch.randn(CLASSES, INPUTS, generator=generator)

    def drawn(count: int) -> Points:
        classes = torch.randint(CLASSES, (count,), generator=generator)
        return centres[classes] + NOISE * torch.randn(count, INPUTS, generator=generator), classes

    return {name: drawn(count) for name, count in SIZES.items()}


class Classifier(nn.Module):
    """One hidden layer of ReLU and dropout."""

    def __init__(self, dropout: float, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(INPUTS, width), nn.ReLU(), Dropout(dropout), nn.Linear(width, CLASSES))

    def forward(self, points: Tensor) -> Tensor:
        """[batch, inputs] to logits [batch, classes]."""
        return self.layers(points)  # type: ignore[no-any-return]


class ClustersProblem(DrawnProblem):
    """The generated points."""

    splits = points
    network = Classifier

    def example_losses(self, model: nn.Module, batch: Points) -> Tensor:
        points, classes = batch
        return F.cross_entropy(model(points), classes, reduction="none")


TASK = DrawnTask(
    name="clusters",
    title="Points about ten centres, as in the README (AdamW)",
    steps=400,
    batch=32,
    family="adamw",
    ignorance=math.log(CLASSES),
    grid=Grid(doubling(0.001, 8), (0.001, 0.01, 0.1, 1.0), (0.0, 0.1, 0.3)),
    starts=(*LEARNING_RATES, *DECAYS, *ALL_OFF, Start("readme", at=Setting(1e-4, 0.1, 0.3))),
    micro_batches=4,
    shorter=2,
    development=True,
    problems=ClustersProblem,
    width=HIDDEN,
)
