"""A small LightningModule and its runs, each a pure function of its arguments."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hdet
from hdet.controllers import Hold
from hdet.spreads import TwoLevel

EXAMPLES, BATCH = 96, 8
PER_EPOCH = EXAMPLES // BATCH


def data(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return TensorDataset(inputs, inputs[:, :3].argmax(dim=1))


def loader(count: int = EXAMPLES, seed: int = 1) -> DataLoader[Any]:
    return DataLoader(data(count, seed), batch_size=BATCH)


class Classifier(LightningModule):
    """Never calls itself: a pass is its training step, not a call of the root module."""

    def __init__(self, schedule: str = "step", logs: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.network = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
        self.schedule = schedule
        self.logs = logs
        self.seen: list[Tensor] = []
        self.batches = list(loader())

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.network(batch[0].to(self.device)).float(), batch[1].to(self.device))

    def training_step(self, batch: Any, index: int) -> Tensor:
        # A resume within an epoch is to draw the same masks and see the same data, which the DataLoader begins anew.
        torch.manual_seed(1000 * self.trainer.current_epoch + index)
        loss = self.loss(self.batches[(index + 5 * self.global_rank) % len(self.batches)])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> Tensor | None:
        loss = self.loss(batch)
        self.seen.append(loss)
        self.log("val_loss", loss)
        return None if self.logs else loss

    def on_validation_epoch_end(self) -> None:
        assert len(self.seen) <= self.trainer.num_val_batches[0]
        self.seen.clear()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.1)
        if self.schedule == "none":
            return optimizer
        if self.schedule == "chained":
            first, *rest = self.parameters()
            return hdet.ChainedOptimizer(
                torch.optim.SGD([first], lr=0.05, momentum=0.9), torch.optim.AdamW(rest, lr=3e-3)
            )
        steps = self.trainer.estimated_stepping_batches
        if self.schedule == "step":
            scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=int(steps) + 1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
        if self.schedule == "epoch":
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


HELD = [
    hdet.LearningRate(controller=Hold()),
    hdet.WeightDecay(controller=Hold()),
    hdet.Dropout(controller=Hold(), spread=TwoLevel(0.0)),
]
"""Measured as ever and moved nowhere."""


def search(**options: Any) -> Any:
    return hdet.lightning.Search(
        **{"probe": loader(64, seed=2), "quiet": True, "window": 5, "guard": None, **options}  # type: ignore[arg-type]
    )


class Kept(Callback):
    """What training leaves, as it is when it ends."""

    states: list[Any]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.states = copy.deepcopy(
            [
                pl_module.state_dict(),
                [optimizer.state_dict() for optimizer in trainer.optimizers],
                [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            ]
        )


def fit(
    folder: Path,
    module: LightningModule,
    *callbacks: Callback,
    epochs: int = 2,
    resumed: Path | None = None,
    train: DataLoader[Any] | None = None,
    **options: Any,
) -> list[Any]:
    kept = Kept()
    trainer = Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": epochs,
            "callbacks": [*callbacks, kept],
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": folder,
            **options,
        }
    )
    torch.manual_seed(7)
    trainer.fit(module, loader() if train is None else train, loader(32, seed=3), ckpt_path=resumed)
    return kept.states
