"""What each of several ranks does under a Lightning Trainer; run by `launch`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning_job import HELD, Classifier, fit, search
from torch import Tensor
from torch.distributed.fsdp import fully_shard


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
    explored = search(knobs=HELD, tail=None)
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


class Sharded(Classifier):
    """By FSDP2, as Lightning's documentation does it."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        fully_shard(self.network[0], mesh=mesh)
        fully_shard(self.network, mesh=mesh)

    def on_train_end(self) -> None:
        optimizer: Any = self.optimizers()
        moments = [value for state in optimizer.state.values() for value in state.values()]
        self.whole = [_whole(value) for value in (*self.parameters(), *moments)]


def _whole(value: Tensor) -> Tensor:
    full: Any = getattr(value, "full_tensor", None)
    return (full() if full is not None else value).detach().clone()


def _sharded(folder: Path, *callbacks: Callback, **options: Any) -> list[Tensor]:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    module = Sharded("step")
    fit(folder, module, *callbacks, **{**_under_torchrun(), "strategy": strategy, **options})
    return module.whole


def sharded(folder: Path) -> dict[str, Any]:
    """What fully sharded training leaves: plain, with a search that is held, and with one that was saved in between."""
    held, searched, again = search(knobs=HELD[:2], exclude=["dropout"]), search(), search(quiet=True)
    kept = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=7, save_top_k=-1)
    found: dict[str, Any] = {
        "plain": _sharded(folder),
        "held": _sharded(folder, held),
        "searched": _sharded(folder, searched, kept, enable_checkpointing=True),
        "resumed": _sharded(folder, again, resumed=folder / "step=7.ckpt"),
    }
    found["windows"] = len(held.search.history)
    for name, one in {"factors": searched, "factors again": again}.items():
        found[name] = {key: learned.factor for key, learned in one.search.shifts.items()}
    return found
