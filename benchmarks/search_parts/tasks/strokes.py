"""Pictures of a few strokes by a variational autoencoder, whose loss draws noise of its own, with AdamW."""

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
SIDE, STROKES, HIDDEN, CODE = 12, 2, 128, 12
Examples = tuple[Tensor]


@lru_cache(maxsize=1)
def examples() -> dict[str, Examples]:
    """(picture [n, 144] of 0 and 1) of each split: strokes of any place, direction and length, soft at their rims."""
    rng = np.random.default_rng(20261202)
    count = sum(SIZES.values())
    up, across = np.meshgrid(np.arange(SIDE), np.arange(SIDE), indexing="ij")
    grid = np.stack([up, across], axis=-1).reshape(-1, 2) / (SIDE - 1)
    ink = np.zeros((count, SIDE * SIDE))
    for _ in range(STROKES):
        begin, end = rng.uniform(0.1, 0.9, (2, count, 1, 2))
        way = end - begin
        along = np.clip(((grid - begin) * way).sum(-1) / np.maximum((way**2).sum(-1), 1e-6), 0, 1)
        distance = np.linalg.norm(grid - begin - along[..., None] * way, axis=-1)
        ink = np.maximum(ink, np.exp(-((distance / 0.08) ** 2)))
    picture = (ink > rng.random(ink.shape)).astype(np.float32)
    parts = torch.split(torch.from_numpy(picture), list(SIZES.values()))
    return {name: (part,) for name, part in zip(SIZES, parts, strict=True)}


class Variational(nn.Module):
    """Layers to a code's mean and spread, and back to the pixels."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        pixels = SIDE * SIDE
        self.encode = nn.Sequential(nn.Linear(pixels, HIDDEN), nn.GELU(), Dropout(dropout), nn.Linear(HIDDEN, 2 * CODE))
        self.decode = nn.Sequential(nn.Linear(CODE, HIDDEN), nn.GELU(), Dropout(dropout), nn.Linear(HIDDEN, pixels))

    def forward(self, picture: Tensor) -> Tensor:
        """[batch, 144] to the negative evidence lower bound of each, [batch], in nats a pixel."""
        mean, log_variance = self.encode(picture).chunk(2, dim=1)
        code = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        told = F.binary_cross_entropy_with_logits(self.decode(code), picture, reduction="none").sum(dim=1)
        far = (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=1) / 2
        return (told + far) / picture.shape[1]  # type: ignore[no-any-return]


class StrokeProblem(DrawnProblem):
    """The generated pictures."""

    splits = examples
    network = Variational

    def example_losses(self, model: nn.Module, batch: Examples) -> Tensor:
        return model(batch[0])  # type: ignore[no-any-return]


TASK = DrawnTask(
    name="strokes",
    title="Pictures of strokes, a variational autoencoder (AdamW)",
    steps=800,
    batch=64,
    family="adamw",
    ignorance=math.log(2),
    grid=Grid(doubling(0.0005, 8), (0.03, 0.3)),
    starts=LEARNING_RATES + DECAYS + ALL_OFF,
    shorter=4,
    problems=StrokeProblem,
)
