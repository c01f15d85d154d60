"""Recommendation: ratings of items by users, generated from a known low-rank rule, factorised with AdamW."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hdet.nn
from search_parts.examples import DrawnProblem, DrawnTask
from search_parts.task import ALL_OFF, DECAYS, DROPOUTS, LEARNING_RATES, Grid, doubling

USERS, ITEMS, TRUE_RANK, RANK = 300, 200, 4, 16
NOISE = 0.5  # the best possible mean square error is its square, 0.25
SIZES = {"train": 9000, "probe": 2000, "test": 4000}
Ratings = tuple[Tensor, Tensor, Tensor]


@lru_cache(maxsize=1)
def ratings() -> dict[str, Ratings]:
    """(user, item, rating) of each split, no pair in two of them, the same for every seed.

    rating = b_u + c_i + p_u . q_i + noise, with standard deviations 0.5, 0.5, 1 and 0.5 of the terms. Users
    and items have long tails: number k is drawn in proportion to (k + 10)^-0.7.
    """
    rng = np.random.default_rng(20240229)
    users, items = 0.5 * rng.standard_normal(USERS), 0.5 * rng.standard_normal(ITEMS)
    left = rng.standard_normal((USERS, TRUE_RANK)) / TRUE_RANK**0.25
    right = rng.standard_normal((ITEMS, TRUE_RANK)) / TRUE_RANK**0.25
    tails = [(np.arange(count) + 10.0) ** -0.7 for count in (USERS, ITEMS)]
    chances = np.outer(tails[0], tails[1]).ravel()
    pairs = rng.choice(USERS * ITEMS, size=sum(SIZES.values()), replace=False, p=chances / chances.sum())
    rng.shuffle(pairs)
    user, item = np.divmod(pairs, ITEMS)
    rating = users[user] + items[item] + (left[user] * right[item]).sum(axis=1)
    rating = rating + NOISE * rng.standard_normal(len(rating))
    columns = (torch.from_numpy(user), torch.from_numpy(item), torch.from_numpy(rating).float())
    parts = zip(*(torch.split(column, list(SIZES.values())) for column in columns), strict=True)
    return dict(zip(SIZES, parts, strict=True))


class Factors(nn.Module):
    """b_u + c_i + <dropout(p_u), q_i>."""

    def __init__(self, dropout: float, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):  # torch's layers draw weights we overwrite below
            self.users, self.items = nn.Embedding(USERS, rank), nn.Embedding(ITEMS, rank)
            self.user_bias, self.item_bias = nn.Embedding(USERS, 1), nn.Embedding(ITEMS, 1)
        self.dropout = hdet.nn.Dropout(dropout)
        for factors in (self.users, self.items):
            nn.init.normal_(factors.weight, std=0.1, generator=generator)
        for bias in (self.user_bias, self.item_bias):
            nn.init.zeros_(bias.weight)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """[batch] users and items to [batch] ratings."""
        product = (self.dropout(self.users(user)) * self.items(item)).sum(dim=1)
        return product + self.user_bias(user)[:, 0] + self.item_bias(item)[:, 0]  # type: ignore[no-any-return]


class RatingsProblem(DrawnProblem):
    """The generated ratings."""

    splits = ratings

    def model(self) -> nn.Module:
        (rank,) = self.sizes  # the task says it
        return Factors(self.rate, rank, torch.Generator().manual_seed(self.seed))

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        named = list(model.named_parameters())
        return [
            {"name": "factors", "params": [p for name, p in named if "bias" not in name]},
            {"name": "biases", "params": [p for name, p in named if "bias" in name], "weight_decay": 0.0},
        ]

    def example_losses(self, model: nn.Module, batch: Ratings) -> Tensor:
        user, item, rating = batch
        return (model(user, item) - rating).square()  # type: ignore[no-any-return]


TASK = DrawnTask(
    name="ratings",
    title="Recommendation by matrix factorisation (AdamW)",
    steps=1000,
    batch=128,
    family="adamw",
    ignorance=1.75,  # the ratings' variance
    grid=Grid(doubling(0.016, 7), (0.03, 0.1, 0.3, 1.0), (0.0, 0.1, 0.3)),
    starts=LEARNING_RATES + DECAYS + DROPOUTS + ALL_OFF,
    micro_batches=4,
    shorter=2,
    development=True,
    problems=RatingsProblem,
    width=RANK,
)
