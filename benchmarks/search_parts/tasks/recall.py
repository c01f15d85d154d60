"""The value that stood behind a key earlier in the row, by gated linear recurrences with AdamW; examples are new."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.app.tasks.draws import draws
from hdet.nn import Dropout
from search_parts.examples import DrawnTask, FreshProblem
from search_parts.task import ALL_OFF, DECAYS, LEARNING_RATES, Grid, doubling

KEYS, VALUES, PAIRS = 24, 24, 12
WIDTH, HEADS, DEPTH = 40, 2, 1


def rows(count: int, seed: int, stream: str, step: int) -> tuple[Tensor]:
    """Token sequences [n, 48]: twelve pairs of a key and a value, and the same pairs in another order."""
    drawn = draws(count * (2 * KEYS + PAIRS), below=1 << 30, seed=seed, stream=stream, step=step).reshape(count, -1)
    keys = np.argsort(drawn[:, :KEYS], axis=1, kind="stable")[:, :PAIRS]
    values = KEYS + drawn[:, KEYS : KEYS + PAIRS] % VALUES
    order = np.argsort(drawn[:, 2 * KEYS :], axis=1, kind="stable")
    told = np.stack([keys, values], axis=2)
    asked = np.take_along_axis(told, order[:, :, None], axis=1)
    return (torch.from_numpy(np.concatenate([told, asked], axis=1).reshape(count, 4 * PAIRS)),)


class Recurrence(nn.Module):
    """A state of products of keys and values that fades by a gate of the input's, read by a query."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Conv1d(WIDTH, WIDTH, 2, groups=WIDTH)
        self.read = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, HEADS)
        self.leave = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.constant_(self.gate.bias, 3.0)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] to the same; the recurrence is written as a triangle of products."""
        x = self.shift(F.pad(x.transpose(1, 2), (1, 0))).transpose(1, 2)
        query, key, value = self.read(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        kept = F.logsigmoid(self.gate(x)).transpose(1, 2).cumsum(dim=2)
        fades = (kept[..., :, None] - kept[..., None, :]).tril().exp().tril()
        read = (query @ F.normalize(key, dim=3).transpose(2, 3) * fades) @ value
        return self.leave(read.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Recaller(nn.Module):
    """An embedding, recurrences and layers in turns, and a head of its own."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(KEYS + VALUES, WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.5)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * DEPTH + 1))
        self.mixers = nn.ModuleList(Recurrence() for _ in range(DEPTH))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), Dropout(dropout), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(DEPTH)
        )
        self.head = nn.Linear(WIDTH, VALUES)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, 48] tokens to logits [batch, 12, values] at the keys of the second half."""
        x = self.tokens(tokens)
        for depth, (mixer, layers) in enumerate(zip(self.mixers, self.layers, strict=True)):
            x = x + mixer(self.norms[2 * depth](x))
            x = x + layers(self.norms[2 * depth + 1](x))
        return self.head(self.norms[-1](x[:, 2 * PAIRS :: 2]))  # type: ignore[no-any-return]


class RecallProblem(FreshProblem):
    """Rows that are drawn anew in every step."""

    network = Recaller
    drawn = staticmethod(rows)

    def example_losses(self, model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        (tokens,) = batch
        targets = tokens[:, 2 * PAIRS + 1 :: 2] - KEYS
        return F.cross_entropy(model(tokens).transpose(1, 2), targets, reduction="none").mean(dim=1)


TASK = DrawnTask(
    name="recall",
    title="Values recalled by their keys, gated linear recurrences (AdamW)",
    steps=500,
    batch=32,
    family="adamw",
    ignorance=math.log(VALUES),
    grid=Grid(doubling(0.0005, 7), (0.03, 0.3)),
    starts=LEARNING_RATES + DECAYS + ALL_OFF,
    micro_batches=4,
    shorter=4,
    problems=RecallProblem,
)
