"""Which surface a set of noisy points was drawn from, told by attention over the set, with AdamW."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.nn import Dropout
from search_parts.examples import DrawnProblem, DrawnTask
from search_parts.task import ALL_OFF, DECAYS, DROPOUTS, LEARNING_RATES, Grid, doubling

SIZES = {"train": 2000, "probe": 600, "test": 2000}
POINTS, WIDTH, HEADS, NOISE = 24, 32, 2, 0.15
Examples = tuple[Tensor, Tensor]
Points = NDArray[np.float64]


def sphere(u: Points, v: Points) -> Points:
    polar = np.arccos(2 * v - 1)
    around = 2 * math.pi * u
    return np.stack([np.sin(polar) * np.cos(around), np.sin(polar) * np.sin(around), np.cos(polar)], -1)


def torus(u: Points, v: Points) -> Points:
    a, b = 2 * math.pi * u, 2 * math.pi * v
    return np.stack([(1 + 0.4 * np.cos(b)) * np.cos(a), (1 + 0.4 * np.cos(b)) * np.sin(a), 0.4 * np.sin(b)], -1)


def cylinder(u: Points, v: Points) -> Points:
    return np.stack([np.cos(2 * math.pi * u), np.sin(2 * math.pi * u), 2 * v - 1], -1)


def saddle(u: Points, v: Points) -> Points:
    x, y = 2 * u - 1, 2 * v - 1
    return np.stack([x, y, x**2 - y**2], -1)


def spiral(u: Points, v: Points) -> Points:
    turn = 4 * math.pi * u
    return np.stack([(0.3 + 0.7 * u) * np.cos(turn), (0.3 + 0.7 * u) * np.sin(turn), 2 * v - 1], -1)


SURFACES = (sphere, torus, cylinder, saddle, spiral)


@lru_cache(maxsize=1)
def examples() -> dict[str, Examples]:
    """(points [n, 24, 3], surface [n]) of each split: each set turned at random, its points moved by noise."""
    rng = np.random.default_rng(20260111)
    count = sum(SIZES.values())
    surfaces = rng.integers(len(SURFACES), size=count)
    u, v = rng.random((2, count, POINTS))
    drawn = np.stack([surface(u, v) for surface in SURFACES])[surfaces, np.arange(count)]
    turns, upper = np.linalg.qr(rng.standard_normal((count, 3, 3)))
    turns = turns * np.sign(np.diagonal(upper, axis1=1, axis2=2))[:, None, :]
    points = drawn @ turns + NOISE * rng.standard_normal(drawn.shape)
    columns = (torch.from_numpy(points).float(), torch.from_numpy(surfaces))
    parts = zip(*(torch.split(column, list(SIZES.values())) for column in columns), strict=True)
    return dict(zip(SIZES, parts, strict=True))


class SetBlock(nn.Module):
    """Attention among places, and a layer for each of them; both after a norm, on a residual stream."""

    def __init__(self, dropout: float, width: int, heads: int = HEADS, wider: int = 2, is_causal: bool = False) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, wider * width), nn.GELU(), nn.Linear(wider * width, width))
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, places, width] to the same."""
        batch, places, width = x.shape
        split = self.qkv(self.norms[0](x)).reshape(batch, places, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, places, width)))
        return x + self.dropout(self.wide(self.norms[1](x)))  # type: ignore[no-any-return]


class SetClassifier(nn.Module):
    """Two blocks, the largest value of each channel over the points, and a layer; no order of points matters."""

    def __init__(self, dropout: float, width: int = WIDTH) -> None:
        super().__init__()
        self.enter = nn.Linear(3, width)
        self.blocks = nn.Sequential(SetBlock(dropout, width), SetBlock(dropout, width))
        self.head = nn.Linear(width, len(SURFACES))

    def forward(self, points: Tensor) -> Tensor:
        """[batch, points, 3] to logits [batch, surfaces]."""
        return self.head(self.blocks(self.enter(points)).amax(dim=1))  # type: ignore[no-any-return]


class PointSetsProblem(DrawnProblem):
    """The generated sets."""

    splits = examples
    network = SetClassifier

    def example_losses(self, model: nn.Module, batch: Examples) -> Tensor:
        points, surfaces = batch
        return F.cross_entropy(model(points), surfaces, reduction="none")


TASK = DrawnTask(
    name="point_sets",
    title="Surfaces told by points on them, attention over sets (AdamW)",
    steps=700,
    batch=64,
    family="adamw",
    ignorance=math.log(len(SURFACES)),
    grid=Grid(doubling(0.001, 7), (0.03, 0.3), (0.0, 0.1)),
    starts=LEARNING_RATES + DECAYS + DROPOUTS + ALL_OFF,
    micro_batches=4,
    shorter=4,
    problems=PointSetsProblem,
)
