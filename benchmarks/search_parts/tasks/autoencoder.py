"""Pictures of curves through a narrow middle and back, by a deep autoencoder with SGD and momentum."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.nn import Dropout
from search_parts.examples import DrawnProblem, DrawnTask
from search_parts.task import ALL_OFF, DECAYS, LEARNING_RATES, Grid, doubling

SIZES = {"train": 5000, "probe": 1500, "test": 3000}
SIDE, POINTS, THICK = 12, 24, 0.06
SIDES = (SIDE * SIDE, 100, 40, 6, 40, 100, SIDE * SIDE)


@lru_cache(maxsize=1)
def examples() -> dict[str, tuple[Tensor]]:
    """Pixels [n, 144] between 0 and 1 of each split: a curve from one random point to another, bent by a third."""
    rng = np.random.default_rng(20261130)
    count = sum(SIZES.values())
    ends = rng.random((3, count, 1, 2))
    along = np.linspace(0.0, 1.0, POINTS)[None, :, None]
    curve = (1 - along) ** 2 * ends[0] + 2 * along * (1 - along) * ends[1] + along**2 * ends[2]
    axis = (np.arange(SIDE) + 0.5) / SIDE
    pixels = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 2)
    squares = np.full((count, len(pixels)), np.inf)
    for point in range(POINTS):
        squares = np.minimum(squares, ((curve[:, point, None] - pixels) ** 2).sum(axis=2))
    ink = torch.from_numpy(np.exp(-squares / (2 * THICK**2))).float()
    return {split: (part,) for split, part in zip(SIZES, torch.split(ink, list(SIZES.values())), strict=True)}


class Autoencoder(nn.Module):
    """Layers of tanh down to six units and up again; the middle and the last layer are linear."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for entering, leaving in pairwise(SIDES):
            layers += [nn.Linear(entering, leaving), nn.Tanh(), Dropout(dropout)]
        middle = SIDES.index(min(SIDES)) * 3
        self.layers = nn.Sequential(*layers[: middle - 2], *layers[middle:-2])

    def forward(self, pixels: Tensor) -> Tensor:
        """[batch, 144] to logits of the same."""
        return self.layers(pixels)  # type: ignore[no-any-return]


class AutoencoderProblem(DrawnProblem):
    """The generated pictures."""

    splits = examples
    network = Autoencoder

    def example_losses(self, model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        (pixels,) = batch
        return F.binary_cross_entropy_with_logits(model(pixels), pixels, reduction="none").mean(dim=1)


TASK = DrawnTask(
    name="autoencoder",
    title="Pictures of curves, a deep autoencoder (SGD with momentum)",
    steps=1000,
    batch=128,
    family="sgd",
    ignorance=math.log(2),
    grid=Grid(doubling(0.4, 7), (1e-6, 1e-5)),
    starts=LEARNING_RATES + DECAYS + ALL_OFF,
    micro_batches=4,
    shorter=4,
    problems=AutoencoderProblem,
)
