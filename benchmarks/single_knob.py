"""What sweeping one hyperparameter finds where all three are wrong, next to one run of hdet that is given all three.

    python benchmarks/single_knob.py            # 3 seeds
    python benchmarks/single_knob.py --quick    # one seed, three of the nine starts

On digits with label noise, from each of its nine starts, every learning rate of the grid is tried with the start's
decay and dropout, every decay with its rate and dropout, every dropout with its rate and decay, by fixed schedules:
up to six runs for one of hdet's. The best of a sweep is chosen by the mean test loss over the very seeds it is shown
with, which flatters the sweeps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from held import BEST
from search_parts.contender import Contender
from search_parts.found import all_contenders, all_tasks
from search_parts.sweep import losses
from search_parts.task import NINE, Grid, Setting, Task

TASK = "digits_noise"
SWEEPS: Mapping[str, Callable[[Setting, Grid], list[Setting]]] = {
    "learning rate": lambda start, grid: [replace(start, lr=lr) for lr in grid.lrs],
    "weight decay": lambda start, grid: [replace(start, decay=decay) for decay in grid.decays],
    "dropout": lambda start, grid: [replace(start, dropout=dropout) for dropout in grid.dropouts],
}


def loss(task: Task, contender: Contender, setting: Setting, seeds: Sequence[int]) -> float:
    """Mean test loss over seeds; a failed run has learnt nothing."""
    return float(losses(task, contender, setting, seeds).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, three starts")
    quick = parser.parse_args().quick
    task, contenders = all_tasks()[TASK], all_contenders()
    starts, seeds = (NINE[::4], range(1)) if quick else (NINE, range(3))
    print(f"{len(seeds)} seeds; grid's best {loss(task, contenders['cosine'], BEST[TASK], seeds):.3f}")
    rows = []
    for start in starts:
        setting = start.setting(BEST[TASK])
        row = {"fixed": loss(task, contenders["cosine"], setting, seeds)}
        for name, sweep in SWEEPS.items():
            row[name] = min(loss(task, contenders["cosine"], one, seeds) for one in sweep(setting, task.grid))
        row["hdet"] = loss(task, contenders["hdet"], setting, seeds)
        rows.append(row)
        print(f"{start.name}  " + "  ".join(f"{name} {value:.3f}" for name, value in row.items()), flush=True)
    print("mean    " + "  ".join(f"{name} {np.mean([row[name] for row in rows]):.3f}" for name in rows[0]))
    best = [min(row[name] for name in SWEEPS) for row in rows]
    won = sum(row["hdet"] < one for row, one in zip(rows, best, strict=True))
    print(f"best of the three sweeps {np.mean(best):.3f}; hdet is below it at {won} of {len(rows)} starts")


if __name__ == "__main__":
    main()
