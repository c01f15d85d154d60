"""The kind of a noisy texture, by depthwise convolutions with batch normalization and gates, with AdamW."""

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

SIZES = {"train": 3000, "probe": 1000, "test": 4000}
SIDE, KINDS, NOISE, CHANNELS = 12, 8, 1.3, 24
Examples = tuple[Tensor, Tensor]


@lru_cache(maxsize=1)
def examples() -> dict[str, Examples]:
    """(picture [n, 1, 12, 12], kind [n]) of each split: waves in one of four directions, or two that are crossed."""
    rng = np.random.default_rng(20261201)
    count = sum(SIZES.values())
    kinds = rng.integers(KINDS, size=count)
    up, across = np.meshgrid(np.arange(SIDE), np.arange(SIDE), indexing="ij")

    def waves(angle: np.ndarray) -> np.ndarray:
        angle = angle + rng.normal(0, 0.12, count)
        pace = rng.uniform(0.9, 1.6, count)
        along = np.cos(angle)[:, None, None] * across + np.sin(angle)[:, None, None] * up
        return np.asarray(np.sin(pace[:, None, None] * along + rng.uniform(0, 2 * math.pi, count)[:, None, None]))

    angle = math.pi / 4 * (kinds % 4)
    crossed = (kinds >= 4)[:, None, None] * waves(angle + math.pi / 2)
    picture = waves(angle) + crossed + NOISE * rng.standard_normal((count, SIDE, SIDE))
    columns = (torch.from_numpy(picture).float()[:, None], torch.from_numpy(kinds))
    parts = zip(*(torch.split(column, list(SIZES.values())) for column in columns), strict=True)
    return dict(zip(SIZES, parts, strict=True))


class Inverted(nn.Module):
    """A block of MobileNet's: wider, depthwise, gated by its own mean, narrower, added to what came in."""

    def __init__(self, channels: int, wider: int = 2) -> None:
        super().__init__()
        inner = wider * channels
        self.widen = nn.Sequential(nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.SiLU())
        self.deep = nn.Sequential(
            nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False), nn.BatchNorm2d(inner), nn.SiLU()
        )
        self.gate = nn.Sequential(nn.Linear(inner, 8), nn.SiLU(), nn.Linear(8, inner), nn.Sigmoid())
        self.narrow = nn.Sequential(nn.Conv2d(inner, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, up, across] to the same."""
        inner = self.deep(self.widen(x))
        gates = self.gate(inner.mean(dim=(2, 3)))[..., None, None]
        return x + self.narrow(inner * gates)  # type: ignore[no-any-return]


class Seer(nn.Module):
    """A convolution that halves the picture, two blocks, and a layer on the mean."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, CHANNELS, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(CHANNELS), nn.SiLU()
        )
        self.blocks = nn.Sequential(Inverted(CHANNELS), Inverted(CHANNELS))
        self.dropout = Dropout(dropout)
        self.head = nn.Linear(CHANNELS, KINDS)

    def forward(self, picture: Tensor) -> Tensor:
        """[batch, 1, 12, 12] to logits [batch, 8]."""
        return self.head(self.dropout(self.blocks(self.stem(picture)).mean(dim=(2, 3))))  # type: ignore[no-any-return]


class TextureProblem(DrawnProblem):
    """The generated textures."""

    splits = examples
    network = Seer

    def example_losses(self, model: nn.Module, batch: Examples) -> Tensor:
        picture, kinds = batch
        return F.cross_entropy(model(picture), kinds, reduction="none")


TASK = DrawnTask(
    name="textures",
    title="Kinds of noisy textures, depthwise convolutions with batch normalization (AdamW)",
    steps=500,
    batch=48,
    family="adamw",
    ignorance=math.log(KINDS),
    grid=Grid(doubling(0.0005, 8), (0.03, 0.3)),
    starts=LEARNING_RATES + DECAYS + ALL_OFF,
    shorter=4,
    problems=TextureProblem,
)
