"""Next-byte prediction, as the benchmark's text tasks share it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.app.tasks import Text
from search_parts.task import Problem, Task

IGNORANCE = math.log(256)


class TextProblem(Problem):
    """`hdet.app.tasks.Text` for one seed."""

    def __init__(self, text: Text, *, seed: int, batch: int, device: str = "cpu") -> None:
        self.workload = text.build(seed=seed, batch_size=batch, device=device)

    def model(self) -> nn.Module:
        return self.workload.model()

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        return self.workload.groups(model)

    def batch(self, step: int) -> Tensor:
        return self.workload.batch(step, 0)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return self.workload.loss(model, batch)

    def probe(self, window: int) -> Tensor:
        return torch.cat(list(self.workload.probe(window)))

    def example_losses(self, model: nn.Module, batch: Tensor) -> Tensor:
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none").mean(dim=1)

    def test_loss(self, model: nn.Module) -> float:
        return self.workload.test_loss(model)


@dataclass(frozen=True, kw_only=True)
class TextTask(Task):
    """A byte GPT of some size on the standard library's source.

    Attributes:
        width, depth, heads: of the model. context: bytes in a sequence.
        train_bytes: how much text there is to train on; all of it by default.
        probe_sequences: in each sub-batch of a probe.
    """

    width: int
    depth: int
    heads: int = 4
    context: int = 64
    train_bytes: int | None = None
    probe_sequences: int = 1

    def narrowed(self, factor: int) -> TextTask:
        return replace(self, width=self.width // factor)

    def text(self, dropout: float) -> Text:
        """What is trained, and on what."""
        return Text(
            width=self.width,
            depth=self.depth,
            heads=self.heads,
            context=self.context,
            dropout=dropout,
            train_bytes=self.train_bytes,
            probe_batches=self.sub_batches,
            probe_sequences=self.probe_sequences,
        )

    def problem(self, seed: int, dropout: float) -> TextProblem:
        return TextProblem(self.text(dropout), seed=seed, batch=self.batch)
