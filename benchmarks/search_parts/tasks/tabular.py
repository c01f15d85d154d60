"""Regression on a table: a perceptron with AdamW on Friedman's first problem, half of whose columns are noise."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from hdet.nn import Dropout
from search_parts.examples import DrawnProblem, DrawnTask
from search_parts.task import ALL_OFF, DECAYS, DROPOUTS, LEARNING_RATES, Grid, doubling

COLUMNS, WIDTH = 10, 64
SIZES = {"train": 1000, "probe": 500, "test": 4000}
NOISE = 2.0
SCALE = 5.0  # about the target's standard deviation
Rows = tuple[Tensor, Tensor]


@lru_cache(maxsize=1)
def table() -> dict[str, Rows]:
    """(columns [rows, 10] in [-1, 1], target [rows]) of each split, the same for every seed.

    y = (10 sin(pi x1 x2) + 20 (x3 - .5)^2 + 10 x4 + 5 x5 + noise - 14) / 5, x uniform in [0, 1] (Friedman 1991).
    """
    rng = np.random.default_rng(19910301)
    x = rng.uniform(size=(sum(SIZES.values()), COLUMNS))
    signal = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    target = (signal + NOISE * rng.standard_normal(len(x)) - 14.0) / SCALE
    columns = (torch.from_numpy(2 * x - 1).float(), torch.from_numpy(target).float())
    parts = zip(*(torch.split(column, list(SIZES.values())) for column in columns), strict=True)
    return dict(zip(SIZES, parts, strict=True))


class Regressor(nn.Module):
    """Three hidden layers with layer normalisation, GELU and dropout."""

    def __init__(self, dropout: float, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = COLUMNS
        for _ in range(3):
            layers += [nn.Linear(inputs, width), nn.LayerNorm(width), nn.GELU(), Dropout(dropout)]
            inputs = width
        self.layers = nn.Sequential(*layers, nn.Linear(inputs, 1))

    def forward(self, rows: Tensor) -> Tensor:
        """[batch, columns] to [batch] targets."""
        return self.layers(rows)[:, 0]  # type: ignore[no-any-return]


class TableProblem(DrawnProblem):
    """The generated table."""

    splits = table
    network = Regressor

    def example_losses(self, model: nn.Module, batch: Rows) -> Tensor:
        rows, target = batch
        return (model(rows) - target).square()  # type: ignore[no-any-return]


TASK = DrawnTask(
    name="tabular",
    title="Regression on a table (AdamW)",
    steps=800,
    batch=64,
    family="adamw",
    ignorance=1.0,  # about the target's variance
    grid=Grid(doubling(0.002, 8), (0.03, 0.3, 3.0), (0.0, 0.1, 0.3)),
    starts=LEARNING_RATES + DECAYS + DROPOUTS + ALL_OFF,
    micro_batches=4,
    shorter=4,
    development=True,
    problems=TableProblem,
    width=WIDTH,
)
