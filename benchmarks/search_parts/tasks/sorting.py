"""A row of numbers put in order, number by number, by a small causal transformer with AdamW; every example is new."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.app.tasks.draws import draws
from search_parts.examples import DrawnTask, FreshProblem
from search_parts.task import ALL_OFF, DECAYS, LEARNING_RATES, Grid, doubling
from search_parts.tasks.point_sets import SetBlock

LENGTH, NUMBERS = 10, 32
WIDTH, HEADS, DEPTH = 48, 4, 2
BAR = NUMBERS
"""Stands between a row and its numbers in order."""


def rows(count: int, seed: int, stream: str, step: int) -> tuple[Tensor]:
    """Token sequences [n, 21]: the row, a bar, the row in order."""
    drawn = draws(count * LENGTH, below=NUMBERS, seed=seed, stream=stream, step=step).reshape(count, LENGTH)
    bar = np.full((count, 1), BAR)
    return (torch.from_numpy(np.concatenate([drawn, bar, np.sort(drawn, axis=1)], axis=1)),)


class Sorter(nn.Module):
    """Embeddings of numbers and places, blocks, and a head of its own."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.numbers = nn.Embedding(NUMBERS + 1, WIDTH)
        self.places = nn.Embedding(2 * LENGTH, WIDTH)
        for table in (self.numbers, self.places):
            nn.init.normal_(table.weight, std=0.1)
        self.blocks = nn.Sequential(*(SetBlock(dropout, WIDTH, HEADS, wider=4, is_causal=True) for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUMBERS)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, 20] tokens to logits [batch, 10, numbers] of what comes after each of the last ten."""
        x = self.numbers(tokens) + self.places.weight
        return self.head(self.norm(self.blocks(x)[:, LENGTH:]))  # type: ignore[no-any-return]


class SortingProblem(FreshProblem):
    """Rows that are drawn anew in every step."""

    network = Sorter
    drawn = staticmethod(rows)

    def example_losses(self, model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        (tokens,) = batch
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.transpose(1, 2), tokens[:, -LENGTH:], reduction="none").mean(dim=1)


TASK = DrawnTask(
    name="sorting",
    title="Numbers put in order, a causal transformer (AdamW)",
    steps=500,
    batch=64,
    family="adamw",
    ignorance=math.log(NUMBERS),
    grid=Grid(doubling(0.0005, 7), (0.03, 0.3)),
    starts=LEARNING_RATES + DECAYS + ALL_OFF,
    micro_batches=4,
    shorter=4,
    problems=SortingProblem,
)
