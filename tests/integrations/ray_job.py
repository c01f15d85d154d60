"""What each Ray worker of test_ray_example.py does: the example, and a held run beside one without hdet."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray.train
import ray_trainer
import torch
from ray.train.torch import prepare_model
from torch import Tensor, nn
from torch.nn import functional as F

import hdet
from hdet.controllers import Hold
from hdet.spreads import TwoLevel

FOLDER = "HDET_TEST_FOLDER"
STEPS = 24
HELD = (
    hdet.LearningRate(controller=Hold()),
    hdet.WeightDecay(controller=Hold()),
    hdet.Dropout(controller=Hold(), spread=TwoLevel(0.0)),
)


def work(config: dict[str, Any]) -> None:
    ray_trainer.train_on_a_worker(config)
    rank = ray.train.get_context().get_world_rank()
    found = {"plain": left(rank), "held": left(rank, HELD)}
    torch.save(found, Path(os.environ[FOLDER]) / f"rank{rank}.pt")


def left(rank: int, knobs: Sequence[Any] = ()) -> list[Tensor]:
    """Weights and moments that a loop leaves, with a search where there are knobs."""
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    model = prepare_model(bare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    if knobs:
        held_out = [ray_trainer.examples(64, torch.Generator().manual_seed(seed)) for seed in range(8)]
        probe = hdet.Probe(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), held_out)
        options: dict[str, Any] = {"total_steps": STEPS, "scheduler": scheduler, "window": 5}
        options |= {"guard": None, "tail": None}
        hdet.attach(model, optimizer, probe=probe, knobs=knobs, quiet=True, **options)
    own = torch.Generator().manual_seed(100 + rank)
    for _ in range(STEPS):
        inputs, labels = ray_trainer.examples(32, own)
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.detach().clone() for tensor in (*bare.parameters(), *moments)]
