"""What torchrun starts for `test_transformers_deepspeed.py`: the Trainer on two ranks, by DeepSpeed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from tiny import gpt2, trainer
from torch import Tensor

import hdet
from hdet.controllers import Hold

# Collectives in shared memory are compiled when they are first asked for; gloo's own do.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

HELD = [hdet.LearningRate(controller=Hold()), hdet.WeightDecay(controller=Hold())]


def run(folder: Path, stage: int, resumed: str | None = None, **options: Any) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        "zero_allow_untested_optimizer": True,
    }
    made = trainer(
        gpt2(),
        folder,
        max_steps=12,
        warmup_steps=2,
        gradient_accumulation_steps=2,
        save_strategy="steps",
        save_steps=7,
        deepspeed=config,
        ddp_backend="gloo",
    )
    callback = hdet.transformers.Search(probe=made.eval_dataset, window=4, guard=None, **options) if options else None
    if callback is not None:
        made.add_callback(callback)
    made.train(resume_from_checkpoint=resumed)
    own = list(made.model_wrapped.module.parameters())
    with deepspeed.zero.GatheredParameters(own, enabled=stage == 3):
        weights: list[Tensor] = [parameter.detach().clone() for parameter in own]
    search = callback.search if callback is not None else None
    return {
        "weights": weights,
        "steps": search.engine.step_count if search is not None else made.state.global_step,
        "foreseen": search.engine.knobs[0].schedule.total_steps if search is not None else None,
        "shifts": {name: learned.factor for name, learned in search.shifts.items()} if search is not None else {},
    }


def main(folder: Path) -> None:
    found = {}
    for stage in (2, 3):
        found[stage] = {
            "plain": run(folder / f"plain{stage}", stage),
            "held": run(folder / f"held{stage}", stage, knobs=HELD),
            "searched": run(folder / f"searched{stage}", stage, quiet=True),
            "resumed": run(
                folder / f"searched{stage}", stage, str(folder / f"searched{stage}" / "checkpoint-7"), quiet=True
            ),
        }
    torch.save(found, folder / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
