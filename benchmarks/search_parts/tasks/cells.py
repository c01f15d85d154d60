"""Cells in noisy pictures, found pixel by pixel by a U-Net with group normalization, with SGD and momentum."""

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

SIZES = {"train": 1500, "probe": 600, "test": 1500}
SIDE, CELLS, NOISE, CHANNELS = 16, 5, 0.5, 8
Examples = tuple[Tensor, Tensor]


@lru_cache(maxsize=1)
def examples() -> dict[str, Examples]:
    """(picture [n, 1, 16, 16], what is cell [n, 16, 16]) of each split: ellipses brighter than an uneven ground.

    One to five cells; a ring without anything inside, as every picture has one, is none.
    """
    rng = np.random.default_rng(20261130)
    count = sum(SIZES.values())
    up, across = np.meshgrid(np.arange(SIDE), np.arange(SIDE), indexing="ij")
    cell = np.zeros((count, SIDE, SIDE), dtype=bool)

    def distances(count: int) -> np.ndarray:
        """Of each pixel to an ellipse's middle, in units of its radius."""
        middle = rng.uniform(1, SIDE - 2, (2, count, 1, 1))
        turn = rng.uniform(0, math.pi, (count, 1, 1))
        radii = rng.uniform(1.3, 3.5, (2, count, 1, 1))
        right, down = across - middle[0], up - middle[1]
        long = (right * np.cos(turn) + down * np.sin(turn)) / radii[0]
        return np.asarray(np.hypot(long, (down * np.cos(turn) - right * np.sin(turn)) / radii[1]))

    many = rng.integers(1, CELLS + 1, size=(count, 1, 1))
    for place in range(CELLS):
        cell |= (distances(count) < 1) & (place < many)
    ring = np.abs(distances(count) - 1) < 0.35
    slope = rng.normal(0, 0.06, (2, count, 1, 1))
    ground = slope[0] * across + slope[1] * up
    picture = rng.uniform(0.6, 1.4, (count, 1, 1)) * (cell | ring) + ground + NOISE * rng.standard_normal(cell.shape)
    columns = (torch.from_numpy(picture).float()[:, None], torch.from_numpy(cell).float())
    parts = zip(*(torch.split(column, list(SIZES.values())) for column in columns), strict=True)
    return dict(zip(SIZES, parts, strict=True))


def twice(entering: int, channels: int) -> nn.Sequential:
    """Two convolutions, each normalized."""
    layers: list[nn.Module] = []
    for into in (entering, channels):
        layers += [nn.Conv2d(into, channels, 3, padding=1, bias=False), nn.GroupNorm(4, channels), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Down to a quarter of the side, and back up beside what went down."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second = twice(1, CHANNELS), twice(CHANNELS, 2 * CHANNELS)
        self.lowest = twice(2 * CHANNELS, 4 * CHANNELS)
        self.dropout = Dropout(dropout)
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * channels, channels, 2, stride=2) for channels in (2 * CHANNELS, CHANNELS)
        )
        self.beside = nn.ModuleList([twice(4 * CHANNELS, 2 * CHANNELS), twice(2 * CHANNELS, CHANNELS)])
        self.head = nn.Conv2d(CHANNELS, 1, 1)

    def forward(self, picture: Tensor) -> Tensor:
        """[batch, 1, 16, 16] to logits [batch, 16, 16]."""
        first = self.first(picture)
        second = self.second(F.max_pool2d(first, 2))
        x = self.dropout(self.lowest(F.max_pool2d(second, 2)))
        for up, beside, kept in zip(self.up, self.beside, (second, first), strict=True):
            x = beside(torch.cat([up(x), kept], dim=1))
        return self.head(x)[:, 0]  # type: ignore[no-any-return]


class CellProblem(DrawnProblem):
    """The generated pictures."""

    splits = examples
    network = UNet

    def example_losses(self, model: nn.Module, batch: Examples) -> Tensor:
        """Cross-entropy in nats a pixel, and one less the overlap (Dice)."""
        picture, cell = batch
        logits = model(picture)
        told = F.binary_cross_entropy_with_logits(logits, cell, reduction="none").mean(dim=(1, 2))
        said = logits.sigmoid()
        overlap = (2 * (said * cell).sum(dim=(1, 2)) + 1) / ((said + cell).sum(dim=(1, 2)) + 1)
        return told + 1 - overlap  # type: ignore[no-any-return]


TASK = DrawnTask(
    name="cells",
    title="Cells in noisy pictures, a U-Net (SGD with momentum)",
    steps=500,
    batch=16,
    family="sgd",
    ignorance=math.log(2) + 0.75,
    grid=Grid(doubling(0.0125, 8), (1e-4, 1e-3)),
    starts=LEARNING_RATES + DECAYS + ALL_OFF,
    shorter=4,
    problems=CellProblem,
)
