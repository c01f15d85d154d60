"""The kind of a noisy sweep of tones, by convolutions with batch normalization, with SGD and momentum."""

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
LENGTH, KINDS, NOISE, CHANNELS = 96, 8, 0.5, (16, 24, 32)
Examples = tuple[Tensor, Tensor]


@lru_cache(maxsize=1)
def examples() -> dict[str, Examples]:
    """(signal [n, 1, 96], kind [n]) of each split.

    A tone begins anywhere and rises, falls, stays or swings, with or without its octave: eight kinds. Pitch, length,
    loudness and phase are an example's own, and so is the noise.
    """
    rng = np.random.default_rng(20261203)
    count = sum(SIZES.values())
    kinds = rng.integers(KINDS, size=count)
    time = np.arange(LENGTH)[None] / LENGTH
    begins, lasts = rng.uniform(0.0, 0.4, (count, 1)), rng.uniform(0.35, 0.6, (count, 1))
    along = np.clip((time - begins) / lasts, 0.0, 1.0)
    way = (kinds % 4)[:, None]
    bend = np.select([way == 0, way == 1, way == 2], [along, -along, 0 * along], np.sin(2 * math.pi * 2 * along))
    pitch = rng.uniform(6.0, 12.0, (count, 1)) * 2.0 ** (0.6 * bend)
    phase = 2 * math.pi * (np.cumsum(pitch / LENGTH, axis=1) + rng.random((count, 1)))
    tone = np.sin(phase) + (kinds[:, None] >= 4) * 0.7 * np.sin(2 * phase)
    heard = (along > 0) & (along < 1)
    signal = rng.uniform(0.6, 1.4, (count, 1)) * tone * heard + NOISE * rng.standard_normal((count, LENGTH))
    columns = (torch.from_numpy(signal).float()[:, None], torch.from_numpy(kinds))
    parts = zip(*(torch.split(column, list(SIZES.values())) for column in columns), strict=True)
    return dict(zip(SIZES, parts, strict=True))


class Listener(nn.Module):
    """Three convolutions that halve the length, each normalized over the batch, and a layer on the mean over time."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        entering = 1
        for channels in CHANNELS:
            layers += [nn.Conv1d(entering, channels, 7, stride=2, padding=3, bias=False), nn.BatchNorm1d(channels)]
            layers += [nn.ReLU()]
            entering = channels
        self.layers = nn.Sequential(*layers)
        self.dropout = Dropout(dropout)
        self.head = nn.Linear(CHANNELS[-1], KINDS)

    def forward(self, signal: Tensor) -> Tensor:
        """[batch, 1, 96] to logits [batch, 8]."""
        return self.head(self.dropout(self.layers(signal).mean(dim=2)))  # type: ignore[no-any-return]


class WaveProblem(DrawnProblem):
    """The generated sweeps."""

    splits = examples
    network = Listener

    def example_losses(self, model: nn.Module, batch: Examples) -> Tensor:
        signal, kinds = batch
        return F.cross_entropy(model(signal), kinds, reduction="none")


TASK = DrawnTask(
    name="waves",
    title="Kinds of noisy tones, convolutions with batch normalization (SGD with momentum)",
    steps=600,
    batch=64,
    family="sgd",
    ignorance=math.log(KINDS),
    grid=Grid(doubling(0.0125, 8), (1e-3, 1e-2)),
    starts=LEARNING_RATES + DECAYS + ALL_OFF,
    shorter=4,
    problems=WaveProblem,
)
