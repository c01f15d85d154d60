"""The next values of noisy, delayed chaos (Mackey-Glass), by causal convolutions with SGD and momentum."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.nn import Dropout
from search_parts.examples import DrawnProblem, DrawnTask
from search_parts.task import ALL_OFF, DECAYS, DROPOUTS, LEARNING_RATES, Grid, doubling

SIZES = {"train": 1500, "probe": 500, "test": 1500}
SEEN, AHEAD, EVERY, NOISE = 48, 6, 3, 0.1
CHANNELS, DILATIONS = 24, (1, 2, 4, 8)
Examples = tuple[Tensor, Tensor]


@lru_cache(maxsize=1)
def examples() -> dict[str, Examples]:
    """(seen [n, 48], coming [n, 6]) of each split: stretches of own series, in units of their standard deviation.

    dx/dt = 0.2 x(t - tau) / (1 + x(t - tau)^10) - 0.1 x, with tau between 17 and 30 and a past of its own for each
    series, in steps of 1, of which every third value is kept. What is seen is noisy, what is to come is not.
    """
    rng = np.random.default_rng(20260112)
    count, warm = sum(SIZES.values()), 300
    delays = rng.integers(17, 31, size=count)
    length = warm + EVERY * (SEEN + AHEAD)
    series = np.empty((count, 30 + length))
    series[:, :30] = 1.2 + 0.2 * rng.standard_normal((count, 30))
    rows = np.arange(count)
    for t in range(30, 30 + length):
        late = series[rows, t - delays]
        series[:, t] = 0.9 * series[:, t - 1] + 0.2 * late / (1 + late**10)
    kept = series[:, 30 + warm :: EVERY]
    kept = (kept - kept.mean()) / kept.std()
    seen = kept[:, :SEEN] + NOISE * rng.standard_normal((count, SEEN))
    columns = (torch.from_numpy(seen).float(), torch.from_numpy(kept[:, SEEN:]).float())
    parts = zip(*(torch.split(column, list(SIZES.values())) for column in columns), strict=True)
    return dict(zip(SIZES, parts, strict=True))


class Forecaster(nn.Module):
    """Four residual causal convolutions with growing gaps, and a layer on the last step, whose weights begin at 0."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.enter = nn.Conv1d(1, CHANNELS, 1)
        self.layers = nn.ModuleList(nn.Conv1d(CHANNELS, CHANNELS, 3, dilation=gap) for gap in DILATIONS)
        self.dropout = Dropout(dropout)
        self.head = nn.Linear(CHANNELS, AHEAD)
        nn.init.zeros_(self.head.weight)  # begins near the mean of all series, which is 0

    def forward(self, seen: Tensor) -> Tensor:
        """[batch, 48] to [batch, 6]."""
        x = self.enter(seen[:, None])
        for layer, gap in zip(self.layers, DILATIONS, strict=True):
            x = x + self.dropout(F.gelu(layer(F.pad(x, (2 * gap, 0)))))
        return self.head(x[:, :, -1])  # type: ignore[no-any-return]


class ForecastProblem(DrawnProblem):
    """The generated series."""

    splits = examples
    network = Forecaster

    def example_losses(self, model: nn.Module, batch: Examples) -> Tensor:
        seen, coming = batch
        return (model(seen) - coming).square().mean(dim=1)  # type: ignore[no-any-return]


TASK = DrawnTask(
    name="forecast",
    title="Chaotic series foretold by causal convolutions (SGD with momentum)",
    steps=900,
    batch=64,
    family="sgd",
    ignorance=1.0,
    grid=Grid(doubling(0.0025, 8), (3e-4, 3e-3), (0.0, 0.1)),
    starts=LEARNING_RATES + DECAYS + DROPOUTS + ALL_OFF,
    micro_batches=4,
    shorter=4,
    problems=ForecastProblem,
)
