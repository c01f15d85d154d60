"""What a user's script does under torchrun: it trains, and in the first attempt one rank kills itself in mid-window."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from training import knobs, network, optimizer_of, train, weights

import hdet

STEPS = 12


def engine_of(replicas: hdet.replicas.Replicas, history: hdet.History | None = None) -> hdet.Engine:
    return hdet.Engine(replicas, knobs(), window=4, total_steps=STEPS, history=history)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    rank = int(os.environ["RANK"])
    with hdet.process_group("gloo", timeout=60):
        model = DistributedDataParallel(network())
        engine = engine_of(
            hdet.distribute(model, optimizer_of(model), exact=True), hdet.History(folder / "history.jsonl")
        )
        checkpoints = hdet.checkpoints.CheckpointFolder(folder / "checkpoints")
        start = checkpoints.resume(engine)
        if rank == 0:
            with (folder / "attempts").open("a") as file:
                file.write(f"{attempt} {start}\n")
        for step in range(engine.step_count, STEPS):
            train(engine, step + 1)
            if engine.cycle.anchor.step == engine.step_count:
                checkpoints.save(engine)
            if attempt == 0 and step == 6 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            torch.save({"weights": weights(engine)[0], "bases": engine.bases}, folder / "end.pt")
