"""A task of milliseconds for the study's tests; `calls` counts the workloads made."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor, nn

CALLS = "HDET_TEST_CALLS"


class Tiny:
    """Fits a line; `fail` makes every loss NaN, `crash` interrupts after some steps; a batch may take its time."""

    def __init__(self, seed: int, batch_size: int, fail: bool, crash: int | None) -> None:
        self.facts = {"train": "made up"}
        self.seed, self.batch_size, self.fail, self.crash = seed, batch_size, fail, crash

    def model(self) -> nn.Module:
        model = nn.Linear(3, 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        return model

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        return [{"name": "all", "params": list(model.parameters())}]

    def batch(self, step: int, replica: int) -> Tensor:
        if self.crash is not None and step >= self.crash and not os.environ.get("HDET_TEST_HEALED"):
            raise KeyboardInterrupt
        time.sleep(float(os.environ.get("HDET_TEST_NAP", "0")))
        generator = torch.Generator().manual_seed(10_000 * self.seed + 100 * step + replica)
        return torch.randn(self.batch_size, 3, generator=generator)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        return loss * float("nan") if self.fail and model.training else loss

    def probe(self, window: int) -> list[Tensor]:
        return [self.batch(5000 + window, j) for j in range(4)]

    def test_loss(self, model: nn.Module) -> float:
        with torch.no_grad():
            return float(self.loss(model.eval(), self.batch(9999, 0)))


def make(
    *, seed: int, batch_size: int, device: str, fail: bool = False, crash: int | None = None, boom: bool = False
) -> Tiny:
    if boom:
        raise RuntimeError("CUDA out of memory")
    counter = os.environ.get(CALLS)
    if counter:
        with open(counter, "a", encoding="utf-8") as file:
            file.write(f"{seed}\n")
    return Tiny(seed, batch_size, fail, crash)
