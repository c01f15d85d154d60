"""What each of several ranks does under a Lightning Trainer; run by `launch`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning_job import HELD, Classifier, fit, search


def _under_torchrun() -> dict[str, Any]:
    """The environment that torchrun would give, around the process group that is there already."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, GROUP_RANK="0", TORCHELASTIC_RUN_ID="test"
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # looked at, not used
    return {"devices": int(ranks), "strategy": DDPStrategy(process_group_backend="gloo")}


def held(folder: Path) -> tuple[list[Any], list[Any], int]:
    """What training leaves without a search and with one that is held."""
    options: dict[str, Any] = {**_under_torchrun(), "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    plain = fit(folder, Classifier("step"), **options)
    options["strategy"] = DDPStrategy(process_group_backend="gloo")
    explored = search(knobs=HELD)
    return plain, fit(folder, Classifier("step"), explored, **options), len(explored.search.history)


def explored_and_resumed(folder: Path) -> dict[str, Any]:
    """A run in one go, and the same from its own checkpoint in mid-window."""
    options: dict[str, Any] = {**_under_torchrun(), "accumulate_grad_batches": 2, "epochs": 6}
    kept = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=7, save_top_k=-1)
    whole = search()
    states = fit(folder, Classifier("step"), whole, kept, enable_checkpointing=True, **options)
    options["strategy"] = DDPStrategy(process_group_backend="gloo")
    again = search()
    resumed = fit(folder, Classifier("step"), again, resumed=folder / "step=7.ckpt", **options)
    return {
        "states": states,
        "resumed": resumed,
        "replicas": len(whole.search.engine.history.windows[0].losses),
        "factors": {name: learned.factor for name, learned in whole.search.shifts.items()},
        "factors again": {name: learned.factor for name, learned in again.search.shifts.items()},
    }
