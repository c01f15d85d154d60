"""Rows of letters from several sources, foretold by a causal transformer whose blocks choose among experts, AdamW."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.app.tasks.draws import draws
from hdet.nn import Dropout
from search_parts.examples import DrawnTask, Examples, FreshProblem
from search_parts.task import ALL_OFF, DECAYS, LEARNING_RATES, Grid, doubling

LETTERS, SOURCES, LENGTH, FINE = 16, 6, 24, 1 << 16
WIDTH, HEADS, DEPTH, EXPERTS, BALANCE = 32, 2, 2, 4, 0.01


@lru_cache(maxsize=1)
def sources() -> np.ndarray:
    """[source, letter before the last, last letter, next letter]: cumulative probabilities, times 65536."""
    rng = np.random.default_rng(20261128)
    likely = rng.dirichlet(np.full(LETTERS, 0.15), size=(SOURCES, LETTERS, LETTERS))
    usual = rng.dirichlet(np.full(LETTERS, 0.15), size=(SOURCES, 1, LETTERS))
    return np.asarray(np.cumsum(0.3 * likely + 0.7 * usual, axis=-1) * FINE)


def rows(count: int, seed: int, stream: str, step: int) -> tuple[Tensor]:
    """Letters [n, 25], each row of one source, whose next letter depends on the last two."""
    drawn = draws(count * (LENGTH + 2), below=FINE, seed=seed, stream=stream, step=step).reshape(count, LENGTH + 2)
    source = drawn[:, 0] % SOURCES
    letters = np.zeros((count, LENGTH + 1), dtype=np.int64)
    for place in range(LENGTH + 1):
        last = letters[:, place - 1] if place > 0 else drawn[:, 0] // SOURCES % LETTERS
        before = letters[:, place - 2] if place > 1 else last
        letters[:, place] = (sources()[source, before, last] <= drawn[:, place + 1, None]).sum(axis=1)
    return (torch.from_numpy(letters.clip(max=LETTERS - 1)),)


class Experts(nn.Module):
    """Each place goes through the one of four small networks that a router prefers, times how much it does."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.enter = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / math.sqrt(WIDTH))
        self.leave = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / math.sqrt(2 * WIDTH))
        self.dropout = Dropout(dropout)
        self.unbalanced = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] to the same. Keeps how unevenly experts were chosen, 1 where evenly."""
        shares = self.router(x).softmax(dim=-1)
        share, chosen = shares.max(dim=-1)
        picked = F.one_hot(chosen, EXPERTS).to(x.dtype)
        self.unbalanced = EXPERTS * (picked.mean(dim=(0, 1)) * shares.mean(dim=(0, 1))).sum()
        hidden = F.gelu(torch.einsum("blw,ewh->bleh", x, self.enter)) * picked[..., None]
        return self.dropout(torch.einsum("bleh,ehw->blw", hidden, self.leave)) * share[..., None]  # type: ignore[no-any-return]


class Block(nn.Module):
    """Causal attention, and experts; both after a norm, on a residual stream."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = Experts(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] to the same."""
        split = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.experts(self.norms[1](x))  # type: ignore[no-any-return]


class Teller(nn.Module):
    """Embeddings of letters and places, blocks, and a head of its own."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        for table in (self.letters, self.places):
            nn.init.normal_(table.weight, std=0.1)
        self.blocks = nn.Sequential(*(Block(dropout) for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, letters: Tensor) -> Tensor:
        """[batch, 24] letters to logits [batch, 24, letters] of what comes next."""
        return self.head(self.norm(self.blocks(self.letters(letters) + self.places.weight)))  # type: ignore[no-any-return]


class SourceProblem(FreshProblem):
    """Rows that are drawn anew in every step; training alone is charged for uneven choices."""

    network = Teller
    drawn = staticmethod(rows)

    def loss(self, model: nn.Module, batch: Examples) -> Tensor:
        told = super().loss(model, batch)
        if model.training:
            for part in model.modules():
                if isinstance(part, Experts):
                    told = told + BALANCE * part.unbalanced
                    part.unbalanced = part.unbalanced.detach()  # so that the model can be copied
        return told

    def example_losses(self, model: nn.Module, batch: Examples) -> Tensor:
        (letters,) = batch
        logits = model(letters[:, :-1])
        return F.cross_entropy(logits.transpose(1, 2), letters[:, 1:], reduction="none").mean(dim=1)


TASK = DrawnTask(
    name="experts",
    title="Letters of several sources, a transformer with experts (AdamW)",
    steps=600,
    batch=32,
    family="adamw",
    ignorance=math.log(LETTERS),
    grid=Grid(doubling(0.001, 7), (0.03, 0.3)),
    starts=LEARNING_RATES + DECAYS + ALL_OFF,
    shorter=4,
    problems=SourceProblem,
)
