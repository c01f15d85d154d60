"""Words heard letter by letter, of unknown beginnings and lengths: a recurrent network's CTC loss, with AdamW."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.nn import Dropout
from search_parts.examples import DrawnProblem, DrawnTask
from search_parts.task import ALL_OFF, DECAYS, LEARNING_RATES, Grid, doubling

SIZES = {"train": 3000, "probe": 1000, "test": 3000}
LETTERS, LONGEST, SHORTEST, FRAMES, BANDS, NOISE, HIDDEN = 12, 5, 3, 26, 16, 1.2, 32
Examples = tuple[Tensor, Tensor, Tensor]


@lru_cache(maxsize=1)
def examples() -> dict[str, Examples]:
    """(sound [n, frames, bands], letters [n, 5] from 1 on, how many of them [n]) of each split.

    A letter glides from one spectrum to another over three to five frames; silence is before, between and behind.
    """
    rng = np.random.default_rng(20261130)
    count = sum(SIZES.values())
    ends = rng.standard_normal((2, LETTERS, BANDS))
    lengths = rng.integers(SHORTEST, LONGEST + 1, size=count)
    words = rng.integers(LETTERS, size=(count, LONGEST))
    sound = NOISE * rng.standard_normal((count, FRAMES, BANDS))
    for row in range(count):
        at = int(rng.integers(3))
        for letter in words[row, : lengths[row]]:
            lasts = int(rng.integers(3, 6))
            along = np.linspace(0, 1, lasts)[:, None]
            glide = (1 - along) * ends[0, letter] + along * ends[1, letter]
            heard = sound[row, at : at + lasts]
            heard += rng.uniform(0.7, 1.3) * glide[: len(heard)]
            at += lasts + int(rng.integers(2))
    columns = (torch.from_numpy(sound).float(), torch.from_numpy(words + 1), torch.from_numpy(lengths))
    parts = zip(*(torch.split(column, list(SIZES.values())) for column in columns), strict=True)
    return dict(zip(SIZES, parts, strict=True))


class Listener(nn.Module):
    """A recurrent layer in both directions, and letters or none for each frame."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.enter = nn.Linear(BANDS, HIDDEN)
        self.both = nn.GRU(HIDDEN, HIDDEN, batch_first=True, bidirectional=True)
        self.dropout = Dropout(dropout)
        self.head = nn.Linear(2 * HIDDEN, LETTERS + 1)

    def forward(self, sound: Tensor) -> Tensor:
        """[batch, frames, bands] to log-probabilities [frames, batch, letters + 1]."""
        heard, _ = self.both(F.gelu(self.enter(sound)))
        return self.head(self.dropout(heard)).transpose(0, 1).log_softmax(dim=2)  # type: ignore[no-any-return]


class SpokenProblem(DrawnProblem):
    """The generated words."""

    splits = examples
    network = Listener

    def example_losses(self, model: nn.Module, batch: Examples) -> Tensor:
        sound, letters, lengths = batch
        frames = torch.full((len(sound),), FRAMES)
        return F.ctc_loss(model(sound), letters, frames, lengths, reduction="none") / lengths


TASK = DrawnTask(
    name="spoken",
    title="Words heard, a recurrent network's CTC loss (AdamW)",
    steps=500,
    batch=32,
    family="adamw",
    ignorance=13.3,
    grid=Grid(doubling(0.0005, 8), (0.03, 0.3)),
    starts=LEARNING_RATES + DECAYS + ALL_OFF,
    shorter=4,
    problems=SpokenProblem,
)
