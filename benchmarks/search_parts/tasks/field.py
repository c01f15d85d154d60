"""A picture as a function of the place in it, by a network on Fourier features with AdamW."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.nn import Dropout
from search_parts.examples import DrawnProblem, DrawnTask
from search_parts.task import ALL_OFF, DECAYS, LEARNING_RATES, Grid, doubling

SIZES = {"train": 40000, "probe": 8000, "test": 16000}
COLOURS, WAVES, DISCS, OCTAVES, WIDTH, DEPTH = 3, 12, 8, 5, 96, 3
Examples = tuple[Tensor, Tensor]


@lru_cache(maxsize=1)
def examples() -> dict[str, Examples]:
    """(places [n, 2] between -1 and 1, colours [n, 3]) of each split: waves in all directions behind discs with edges.

    Each colour has a mean of 0 and a variance of 1.
    """
    rng = np.random.default_rng(20261202)
    places = rng.uniform(-1.0, 1.0, size=(sum(SIZES.values()), 2))
    turns = rng.standard_normal((2, WAVES)) * rng.uniform(1.0, 8.0, WAVES)
    colours = np.sin(places @ turns + rng.uniform(0.0, 2 * math.pi, WAVES)) @ rng.standard_normal((WAVES, COLOURS)) / 4
    for _ in range(DISCS):
        middle, radius, colour = rng.uniform(-1.0, 1.0, 2), rng.uniform(0.1, 0.4), rng.standard_normal(COLOURS)
        inside = ((places - middle) ** 2).sum(axis=1) < radius**2
        colours[inside] = colour
    colours = (colours - colours.mean(axis=0)) / colours.std(axis=0)
    columns = [torch.from_numpy(column).float() for column in (places, colours)]
    parts = zip(*(torch.split(column, list(SIZES.values())) for column in columns), strict=True)
    return dict(zip(SIZES, parts, strict=True))


class Field(nn.Module):
    """Sines and cosines of the place in five octaves, and layers of SiLU."""

    octaves: Tensor

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.register_buffer("octaves", math.pi * 2.0 ** torch.arange(-1, OCTAVES - 1))
        self.enter = nn.Linear(2 + 4 * OCTAVES, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.dropout = Dropout(dropout)
        self.leave = nn.Linear(WIDTH, COLOURS)

    def forward(self, places: Tensor) -> Tensor:
        """[batch, 2] to [batch, 3]."""
        angles = (places[:, :, None] * self.octaves).flatten(1)
        x = self.enter(torch.cat([places, torch.sin(angles), torch.cos(angles)], dim=1))
        for layer in self.layers:
            x = layer(self.dropout(F.silu(x)))
        return self.leave(F.silu(x))  # type: ignore[no-any-return]


class FieldProblem(DrawnProblem):
    """The generated picture."""

    splits = examples
    network = Field

    def example_losses(self, model: nn.Module, batch: Examples) -> Tensor:
        places, colours = batch
        return (model(places) - colours).square().mean(dim=1)  # type: ignore[no-any-return]


TASK = DrawnTask(
    name="field",
    title="A picture as a function of the place, a coordinate network (AdamW)",
    steps=800,
    batch=256,
    family="adamw",
    ignorance=1.0,
    grid=Grid(doubling(0.001, 7), (0.01, 0.1)),
    starts=LEARNING_RATES + DECAYS + ALL_OFF,
    micro_batches=4,
    shorter=4,
    problems=FieldProblem,
)
