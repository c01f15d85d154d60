"""The noise in a noised point, as a diffusion model foretells it, by a residual network with AdamW."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from hdet.nn import Dropout
from search_parts.examples import DrawnProblem, DrawnTask
from search_parts.task import ALL_OFF, DECAYS, LEARNING_RATES, Grid, doubling

SIZES = {"train": 40000, "probe": 4000, "test": 8000}
WIDTH, BLOCKS, WAVES, SPACE = 96, 3, 8, 16
Examples = tuple[Tensor, Tensor, Tensor]


@lru_cache(maxsize=1)
def examples() -> dict[str, Examples]:
    """(noised [n, 16], time [n, 1], noise [n, 16]) of each split, each point with one time and one noise.

    Points lie on three interlaced spirals in two dimensions, which eight pairs of other scales and turns show again. At
    time t between 0 and 1 the share of the signal is cos(pi t / 2), that of the noise sin(pi t / 2).
    """
    rng = np.random.default_rng(20261129)
    count = sum(SIZES.values())
    along, arm = np.sqrt(rng.random(count)), rng.integers(3, size=count)
    turn = 3.0 * math.pi * along + 2.0 * math.pi * arm / 3.0
    flat = np.stack([along * np.cos(turn), along * np.sin(turn)], axis=1) * 1.8
    flat = flat + 0.03 * rng.standard_normal(flat.shape)
    shown = [np.tanh(flat @ rng.standard_normal((2, 2)) * (1.0 + pair / 4.0)) for pair in range(SPACE // 2)]
    points = np.concatenate(shown, axis=1)
    points = (points - points.mean(axis=0)) / points.std(axis=0)
    time, noise = rng.random((count, 1)), rng.standard_normal(points.shape)
    noised = np.cos(math.pi / 2 * time) * points + np.sin(math.pi / 2 * time) * noise
    columns = [torch.from_numpy(column).float() for column in (noised, time, noise)]
    parts = zip(*(torch.split(column, list(SIZES.values())) for column in columns), strict=True)
    return dict(zip(SIZES, parts, strict=True))


class TimedBlock(nn.Module):
    """A residual layer that is shifted and scaled by the time."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.timed = nn.Linear(2 * WAVES, 2 * WIDTH)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), Dropout(dropout), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, waves: Tensor) -> Tensor:
        """[batch, width] and [batch, 16] to [batch, width]."""
        scale, shift = self.timed(waves).chunk(2, dim=1)
        return x + self.layers(self.norm(x) * (1 + scale) + shift)  # type: ignore[no-any-return]


class Denoiser(nn.Module):
    """Blocks between two layers, the last of which begins at 0."""

    turns: Tensor

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.enter = nn.Linear(SPACE, WIDTH)
        self.blocks = nn.ModuleList(TimedBlock(dropout) for _ in range(BLOCKS))
        self.leave = nn.Linear(WIDTH, SPACE)
        nn.init.zeros_(self.leave.weight)
        self.register_buffer("turns", math.pi * 2.0 ** torch.arange(WAVES))

    def forward(self, noised: Tensor, time: Tensor) -> Tensor:
        """[batch, 16] and [batch, 1] to the noise [batch, 16]."""
        waves = torch.cat([torch.sin(time * self.turns), torch.cos(time * self.turns)], dim=1)
        x = self.enter(noised)
        for block in self.blocks:
            x = block(x, waves)
        return self.leave(x)  # type: ignore[no-any-return]


class DiffusionProblem(DrawnProblem):
    """The noised points."""

    splits = examples
    network = Denoiser

    def example_losses(self, model: nn.Module, batch: Examples) -> Tensor:
        noised, time, noise = batch
        return (model(noised, time) - noise).square().mean(dim=1)  # type: ignore[no-any-return]


TASK = DrawnTask(
    name="diffusion",
    title="The noise in noised points, a diffusion model's network (AdamW)",
    steps=1000,
    batch=128,
    family="adamw",
    ignorance=1.0,
    grid=Grid(doubling(0.0005, 7), (0.03, 0.3)),
    starts=LEARNING_RATES + DECAYS + ALL_OFF,
    micro_batches=4,
    shorter=4,
    problems=DiffusionProblem,
)
