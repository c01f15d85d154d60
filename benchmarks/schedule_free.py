"""Schedule-Free AdamW from wrong learning rates, alone and under hdet's recipe: test loss, and where the rate ends.

    python benchmarks/schedule_free.py --seeds 3

The task is digits with a fifth of the labels wrong, 600 steps of 32 examples. hdet is charged its probes: it makes
fewer steps than the optimizer alone, so that both take the same number of passes over examples (a probe's forward pass
counts as a third of a training pass). Printed with "+-" is the standard deviation over seeds.
"""

from __future__ import annotations

import argparse
import warnings
from statistics import mean
from typing import Any

import numpy as np
import schedulefree
import torch
from torch import Tensor, nn

import hdet
from hdet.app.tasks import Digits
from hdet.schedules import Constant

TASK = Digits(width=32, depth=2, label_noise=0.2)
STEPS, BATCH, RATE = 600, 32, 3e-3
SCALES = (0.01, 0.1, 1.0, 10.0)


class Loss:
    """The task's, counting what it was asked for in training passes over examples."""

    def __init__(self, seed: int) -> None:
        self.workload = TASK.build(seed=seed, batch_size=BATCH)
        self.passes = 0.0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.passes += len(batch[1]) / BATCH * (1.0 if torch.is_grad_enabled() else 1 / 3)
        return self.workload.loss(model, batch)


def run(seed: int, scale: float, explored: bool) -> tuple[float, float]:
    """Test loss and last learning rate of one run of `STEPS` passes."""
    loss = Loss(seed)
    model = loss.workload.model()
    optimizer = schedulefree.AdamWScheduleFree(loss.workload.groups(model), lr=RATE * scale, weight_decay=0.1)
    optimizer.train()
    engine = None
    if explored:
        probe = hdet.Probe(loss, loss.workload.probe)
        schedule = Constant(RATE * scale)
        engine = hdet.recommended(model, optimizer, total_steps=STEPS, probe=probe, schedule=schedule, quiet=True)
    step = 0
    while loss.passes < STEPS:
        batch = loss.workload.batch(step, 0)
        if engine is None:
            own = loss(model, batch)
            own.backward()
        else:
            with engine.replicas[0] as replica:
                own = loss(replica.model, batch)
                own.backward()
        optimizer.step()
        optimizer.zero_grad()
        if engine is not None:
            engine.step(own.detach())
        step += 1
    if engine is not None:
        engine.finish()
    optimizer.eval()
    return loss.workload.test_loss(model), float(optimizer.param_groups[0]["lr"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(parser.parse_args().seeds)
    warnings.simplefilter("ignore")  # how small the probe is, and how hdet takes the optimizer's decay
    print("| rate given | alone | with hdet | its last rate |\n|---|---|---|---|", flush=True)
    for scale in SCALES:
        alone, explored = ([run(seed, scale, on) for seed in seeds] for on in (False, True))
        losses = ([loss for loss, _ in rows] for rows in (alone, explored))
        told = [f"{mean(own):.3f} +- {np.std(own, ddof=1) if len(own) > 1 else np.nan:.3f}" for own in losses]
        rate = mean(rate for _, rate in explored)
        print(f"| {RATE * scale:g} | {told[0]} | {told[1]} | {rate:.2g} |", flush=True)


if __name__ == "__main__":
    main()
