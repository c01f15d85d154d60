"""A recurrent network (GRU) on streaming text with AdamW."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from hdet.app.tasks import Text
from hdet.nn import CrossEntropyLoss
from search_parts.examples import built
from search_parts.task import ALL_OFF, DECAYS, LEARNING_RATES, Grid, Task, doubling
from search_parts.text import IGNORANCE, TextProblem

WIDTH = 64


class Recurrent(nn.Module):
    """Embedding, one layer of GRU, a linear head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.body = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)
        self.criterion = CrossEntropyLoss()

    def forward(self, text: Tensor) -> Tensor:
        """[batch, context] bytes to logits [batch, context, 256]."""
        return self.head(self.body(self.embedding(text))[0])  # type: ignore[no-any-return]


class RecurrentProblem(TextProblem):
    """The text, for another model."""

    def __init__(self, text: Text, *, seed: int, batch: int, width: int) -> None:
        super().__init__(text, seed=seed, batch=batch)
        self.width = width

    def model(self) -> nn.Module:
        return built(self.workload.seed, lambda: Recurrent(self.width))


@dataclass(frozen=True, kw_only=True)
class RecurrentTask(Task):
    """A GRU on the standard library's source.

    Attributes:
        width: of the embedding and the layer.
    """

    width: int = WIDTH

    def problem(self, seed: int, dropout: float) -> RecurrentProblem:
        text = Text(context=64, probe_batches=self.sub_batches, probe_sequences=1)
        return RecurrentProblem(text, seed=seed, batch=self.batch, width=self.width)


TASK = RecurrentTask(
    name="text_recurrent",
    title="Byte GRU (AdamW)",
    steps=500,
    batch=16,
    family="adamw",
    ignorance=IGNORANCE,
    grid=Grid(doubling(1e-3, 7), (0.1,)),
    starts=LEARNING_RATES + DECAYS + ALL_OFF,
    clip=1.0,
    development=True,
)
