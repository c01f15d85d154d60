"""The density of where an arm's joints are, by a normalizing flow, whose loss goes below 0, with AdamW."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from hdet.nn import Dropout
from search_parts.examples import DrawnProblem, DrawnTask
from search_parts.task import ALL_OFF, DECAYS, LEARNING_RATES, Grid, doubling

SIZES = {"train": 4000, "probe": 1500, "test": 5000}
JOINTS, NOISE, LAYERS, WIDTH = 3, 0.08, 6, 48
NUMBERS = 2 * JOINTS
Examples = tuple[Tensor]


@lru_cache(maxsize=1)
def examples() -> dict[str, Examples]:
    """(places [n, 6]) of each split, each number of variance 1: an arm of three links, bent at random, and noise."""
    rng = np.random.default_rng(20261129)
    count = sum(SIZES.values())
    bends = rng.normal(0, 0.7, (count, JOINTS)) + rng.choice([-0.9, 0.9], (count, JOINTS))
    angles = np.cumsum(bends, axis=1)
    joints = np.cumsum(np.stack([np.cos(angles), np.sin(angles)], axis=-1), axis=1)
    places = joints.reshape(count, NUMBERS) + NOISE * rng.standard_normal((count, NUMBERS))
    places = (places - places.mean(axis=0)) / places.std(axis=0)
    parts = torch.split(torch.from_numpy(places).float(), list(SIZES.values()))
    return {name: (part,) for name, part in zip(SIZES, parts, strict=True)}


class Coupling(nn.Module):
    """Half of the numbers say how the other half are stretched and moved (RealNVP)."""

    def __init__(self, dropout: float, order: list[int]) -> None:
        super().__init__()
        self.order = order
        half = NUMBERS // 2
        self.network = nn.Sequential(
            nn.Linear(half, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), Dropout(dropout)
        )
        self.last = nn.Linear(WIDTH, 2 * half)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, 6] to the same, and the logarithm of the determinant [batch]."""
        kept, moved = x[:, self.order].chunk(2, dim=1)
        stretch, shift = self.last(self.network(kept)).chunk(2, dim=1)
        stretch = 2 * torch.tanh(stretch / 2)
        return torch.cat([kept, moved * stretch.exp() + shift], dim=1), stretch.sum(dim=1)


class Flow(nn.Module):
    """Couplings, each of another half, to a standard normal density."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        turns = np.random.default_rng(3)
        self.couplings = nn.ModuleList(Coupling(dropout, turns.permutation(NUMBERS).tolist()) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 6] to the negative logarithm of each one's density, [batch], in nats a number."""
        volume = torch.zeros(len(x))
        for coupling in self.couplings:
            x, changed = coupling(x)
            volume = volume + changed
        apart = (x.square() / 2 + math.log(2 * math.pi) / 2).sum(dim=1)
        return (apart - volume) / NUMBERS


class FlowProblem(DrawnProblem):
    """The generated places."""

    splits = examples
    network = Flow

    def example_losses(self, model: nn.Module, batch: Examples) -> Tensor:
        return model(batch[0])  # type: ignore[no-any-return]


TASK = DrawnTask(
    name="flow",
    title="The density of an arm's joints, a normalizing flow (AdamW)",
    steps=600,
    batch=64,
    family="adamw",
    ignorance=0.5 * math.log(2 * math.pi * math.e),
    grid=Grid(doubling(0.0005, 8), (0.03, 0.3)),
    starts=LEARNING_RATES + DECAYS + ALL_OFF,
    shorter=4,
    problems=FlowProblem,
)
