"""A learning rate far off, on a small GPT under a Lightning Trainer: the search makes up for it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning_job import HELD, fit
from torch import Tensor
from torch.utils.data import DataLoader

import hdet
from hdet.app.tasks.text import Text

STEPS, BATCH = 800, 16
GOOD = 1e-2


@lru_cache(maxsize=1)
def task() -> Any:
    return Text(width=32, depth=1, heads=2, context=32, test_sequences=256).build(seed=0, batch_size=BATCH)


class Steps(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, step: int) -> Tensor:
        if step >= STEPS:
            raise IndexError
        batch: Tensor = task().batch(step, 0)
        return batch


class Language(LightningModule):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.model = task().model()
        self.rate = rate

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = task().loss(self.model, batch)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(task().groups(self.model), lr=self.rate, weight_decay=0.1)


def final_loss(folder: Path, rate: float, *, searched: bool) -> float:
    """The test loss under the recipe's schedule; what is not searched is measured and moved nowhere."""
    workload = task()
    probe = hdet.Probe(lambda module, batch: workload.loss(module.model, batch), workload.probe)
    module = Language(rate)
    fit(
        folder,
        module,
        hdet.lightning.Search(probe=probe, quiet=True, **({} if searched else {"knobs": HELD[:2], "guard": None})),
        epochs=1,
        train=DataLoader(Steps(), batch_size=None),
        limit_val_batches=0,
    )
    return float(workload.test_loss(module.model))


@pytest.fixture(scope="module")
def well_set(tmp_path_factory: pytest.TempPathFactory) -> float:
    return final_loss(tmp_path_factory.mktemp("well_set"), GOOD, searched=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("factor", [1 / 30, 30.0])
def test_a_rate_thirty_times_off_ends_near_the_well_set_run(factor: float, well_set: float, tmp_path: Path) -> None:
    assert final_loss(tmp_path, GOOD * factor, searched=True) < well_set + 0.1
