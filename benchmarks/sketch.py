"""What a sketch of gradients changes in Contrast's t: the same runs, remembered whole and in ever fewer numbers.

    python benchmarks/sketch.py             # three tasks, two seeds; some minutes
    python benchmarks/sketch.py --quick

Each task is trained with dropout explored and never moved, so that all runs of a seed are the same training, and
`Contrast(sketch=m)` remembers each micro-batch's gradient in m numbers. Printed, for each m less than the parameters P:
the correlation of t with that of whole gradients over all windows, the standard deviation of their difference, and its
share of t's own spread (the t of a knob without effect has an sd of about 1.2). A sketch's error falls as 1 / sqrt(m):
the last column is that share at the default of 2^20 numbers, if the model had as many parameters as make it fold.
"""

from __future__ import annotations

import argparse
import math
from importlib import import_module

import numpy as np
import torch
from search_parts.task import Problem, Setting, Task, split
from torch import Tensor, nn

import hdet
from hdet.controllers import Hold

SIZES = (1024, 4096, 16384)
WINDOW = 20
TASKS = {"text_small": 0.003, "digits_noise": 0.1, "ratings": 0.03}
"""With the learning rate that each is trained at."""


def t_values(
    task: Task, problem: Problem, rate: float, size: int, horizon: int, windows: int, seed: int
) -> list[float]:
    """Of dropout, in every window in which it was judged."""

    def probe_loss(model: nn.Module, batch: object) -> Tensor:
        return problem.example_losses(model, batch).view(task.sub_batches, -1).mean(dim=1)

    model = problem.model()
    optimizer = task.optimizer(problem.groups(model), Setting(rate, 0.0))
    engine = hdet.Engine(
        hdet.micro_batches(model, optimizer, 4),
        [hdet.Dropout(evidence=hdet.evidence.Contrast(horizon=horizon, sketch=size), controller=Hold())],
        window=WINDOW,
        signal=hdet.Probe(probe_loss, lambda window: [problem.probe(window)]),
        total_steps=windows * WINDOW,
        seed=seed,
    )
    found = []
    for step in range(windows * WINDOW):
        losses = []
        parts = split(problem.batch(step), 4)
        for replica in engine.replicas:
            with replica:
                torch.manual_seed(97 * step + replica.index)  # the same masks in every run
                loss = problem.loss(replica.model, parts[replica.index])
                loss.backward()
            losses.append(loss.detach())
        engine.share_gradients()
        optimizer.step()
        optimizer.zero_grad()
        record = engine.step(losses)
        if record is not None and record.estimates["dropout"]["t"]:
            found.append(record.estimates["dropout"]["t"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 windows and one seed")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    windows, seeds = (5, 1) if quick else (15, 2)
    print(f"{'task':<14}{'P':>8}{'horizon':>9}{'m':>8}{'windows':>9}{'corr':>8}{'sd':>8}{'share':>8}{'at 2^20':>9}")
    for name, rate in TASKS.items():
        task: Task = import_module(f"search_parts.tasks.{name}").TASK
        for horizon in (400, 0):
            problems = [task.problem(seed, 0.2) for seed in range(seeds)]
            size = sum(p.numel() for p in problems[0].model().parameters())
            told = {
                m: np.concatenate(
                    [t_values(task, problem, rate, m, horizon, windows, seed) for seed, problem in enumerate(problems)]
                )
                for m in (2**20, *(m for m in SIZES if m < size))
            }
            whole = told.pop(2**20)
            for m, sketched in told.items():
                change = (sketched - whole).std()
                share = change / whole.std()
                print(
                    f"{name:<14}{size:>8}{horizon:>9}{m:>8}{len(whole):>9}{np.corrcoef(whole, sketched)[0, 1]:>8.3f}"
                    f"{change:>8.3f}{share:>8.3f}{share * math.sqrt(m / 2**20):>9.4f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
