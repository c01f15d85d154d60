"""A Trainer on several ranks, started by torchrun: plain, held, searched, resumed; each rank's outcome in a file.

Once in DistributedDataParallel, and once sharded by FSDP2.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from tiny import gpt2, trainer
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import Trainer

import hdet
from hdet.controllers import Hold
from hdet.spreads import TwoLevel

HELD = [
    hdet.LearningRate(controller=Hold()),
    hdet.WeightDecay(controller=Hold()),
    hdet.Dropout(controller=Hold(), spread=TwoLevel(0.0)),
]


SHARDS = {"transformer_layer_cls_to_wrap": ["GPT2Block"], "state_dict_type": "SHARDED_STATE_DICT"}


class Sharded(Trainer):  # type: ignore[misc]
    """Told to shard, which Accelerate leaves out on a CPU."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.state.distributed_type = DistributedType.FSDP
        AcceleratorState._shared_state["fsdp_plugin"] = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        self.is_fsdp_enabled = True


def made(folder: Path, callback: hdet.transformers.Search | None, sharded: bool) -> Trainer:
    AcceleratorState._reset_state()
    found = trainer(
        gpt2(),
        folder,
        kind=Sharded if sharded else Trainer,
        fsdp=sharded,
        fsdp_config=dict(SHARDS) if sharded else None,
        max_steps=16,
        gradient_accumulation_steps=2,
        ragged=True,
        save_strategy="steps",
        save_steps=9,
        ddp_backend="gloo",
    )
    if callback is not None:
        found.add_callback(callback)
    return found


def outcome(run: Trainer, callback: hdet.transformers.Search | None) -> dict[str, Any]:
    weights = {name: value.clone() for name, value in run.model.named_parameters()}
    search = callback.search if callback is not None else None
    return {
        "sharded": isinstance(run.model, FSDPModule),
        "weights": {
            name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in weights.items()
        },
        "losses": [entry["loss"] for entry in run.state.log_history if "loss" in entry],
        "told": [record.loss for record in search.history] if search is not None else [],
        "shifts": {name: shift.factor for name, shift in search.shifts.items()} if search is not None else {},
        "replicas": search.engine.replicas[0].index if search is not None else None,
    }


def runs(folder: Path, sharded: bool) -> dict[str, Any]:
    data = trainer(gpt2(), folder / "data", ragged=True)
    # Of shards no gradient is seen whole, and dropout is judged by forward passes.
    held = {"knobs": HELD[:2] if sharded else HELD, "tail": None}
    searched = {"objective": data.train_dataset} if sharded else {}
    found = {}
    for name, options in {"plain": None, "held": held, "searched": searched, "resumed": searched}.items():
        resumes = name == "resumed"
        callback = hdet.transformers.Search(probe=data.eval_dataset, **options) if options is not None else None
        run = made(folder / ("searched" if resumes else name), callback, sharded)
        run.train(resume_from_checkpoint=str(folder / "searched" / "checkpoint-9") if resumes else None)
        found[name] = outcome(run, callback)
    return found


def main(folder: Path) -> None:
    found = {name: runs(folder / name, sharded) for name, sharded in (("ddp", False), ("fsdp2", True))}
    torch.save(found, folder / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
