"""What every trainer trains: the small GPT of the tests, under one schedule of the user's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

import hdet
from hdet.app.tasks.text import Text, TextWorkload
from hdet.controllers import Hold
from hdet.spreads import TwoLevel

BATCH = 16
HELD = (
    hdet.LearningRate(controller=Hold()),
    hdet.WeightDecay(controller=Hold()),
    hdet.Dropout(controller=Hold(), spread=TwoLevel(0.0)),
)


@cache
def task(seed: int) -> TextWorkload:
    return Text(width=32, depth=1, heads=2, context=32, dropout=0.1, test_sequences=256).build(
        seed=seed, batch_size=BATCH
    )


@dataclass(frozen=True)
class Case:
    """One run: how it is set, and what hdet does in it. `warmup` is a share of the steps."""

    rate: float
    steps: int
    seed: int
    warmup: float = 0.1
    explored: bool = True
    held: bool = False

    def model(self) -> nn.Module:
        return Predicting(task(self.seed))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(task(self.seed).groups(model), lr=self.rate, weight_decay=0.1)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        rise = int(self.warmup * self.steps)
        return LambdaLR(optimizer, lambda t: t / rise if t < rise else max(0.0, (self.steps - t) / (self.steps - rise)))

    def probe(self) -> hdet.Probe:
        return hdet.Probe(lambda model, batch: model(batch)["loss"], task(self.seed).probe)

    def options(self, *, forward: bool = True) -> dict[str, Any]:
        """What `hdet.attach` is given; `forward` says whether knobs of the forward pass can be had."""
        held = [knob for knob in HELD if forward or knob.acts_on != "forward"]
        return {"quiet": True, **({"knobs": held, "guard": None} if self.held else {})}


class Predicting(nn.Module):
    """The GPT, which returns its loss as models for the Trainer of Transformers do."""

    def __init__(self, workload: TextWorkload) -> None:
        super().__init__()
        self.task = workload
        self.model = workload.model()

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"loss": self.task.loss(self.model, tokens)}


class Batches(Dataset[dict[str, Tensor]]):
    """One item is one batch of a step."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __len__(self) -> int:
        return self.case.steps

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        if step >= self.case.steps:
            raise IndexError(step)
        return {"tokens": task(self.case.seed).batch(step, 0)}
