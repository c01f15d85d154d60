"""A Trainer on several ranks, started by torchrun: plain, held, searched, resumed; each rank's outcome in a file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from tiny import gpt2, trainer
from transformers import Trainer

import hdet
from hdet.controllers import Hold
from hdet.spreads import TwoLevel

HELD = [
    hdet.LearningRate(controller=Hold()),
    hdet.WeightDecay(controller=Hold()),
    hdet.Dropout(controller=Hold(), spread=TwoLevel(0.0)),
]


def made(folder: Path, callback: hdet.transformers.Search | None) -> Trainer:
    found = trainer(
        gpt2(),
        folder,
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
    weights = {name: value.clone() for name, value in run.model.state_dict().items()}
    search = callback.search if callback is not None else None
    return {
        "weights": weights,
        "losses": [entry["loss"] for entry in run.state.log_history if "loss" in entry],
        "told": [record.loss for record in search.history] if search is not None else [],
        "shifts": {name: shift.factor for name, shift in search.shifts.items()} if search is not None else {},
        "replicas": search.engine.replicas[0].index if search is not None else None,
    }


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    found = {}
    for name, options in {"plain": None, "held": {"knobs": HELD, "tail": None}, "searched": {}}.items():
        probe = trainer(gpt2(), folder / "probe", ragged=True).eval_dataset
        callback = hdet.transformers.Search(probe=probe, **options) if options is not None else None
        run = made(folder / name, callback)
        run.train()
        found[name] = outcome(run, callback)
    callback = hdet.transformers.Search(probe=probe)
    run = made(folder / "searched", callback)
    run.train(resume_from_checkpoint=str(folder / "searched" / "checkpoint-9"))
    found["resumed"] = outcome(run, callback)
    torch.save(found, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
