"""What folded gradients do to whole runs: the recipe with whole gradients against the recipe with small sketches.

    python benchmarks/sketch_search.py                      # seven tasks, 5 seeds, one process; a quarter of an hour
    python benchmarks/sketch_search.py --tasks ratings --seeds 2
    python benchmarks/sketch_search.py --csv runs.csv       # and a line a run

Tasks of benchmarks/search.py whose models have dropout, with the best fixed rate and decay of its sweeps. Each run
begins with the best dropout, and with one of 0.5. `Contrast` remembers gradients whole, as it does for any model of
less than 2^20 parameters, or in m = 4,096 or 1,024 numbers. A sketch's error is at most 1 / sqrt(m) whatever the
model's size. So these have up to 16 and 32 times the error of the default of 2^20 numbers on a large model.

Printed by task, start and m: the mean test loss of both; the difference, paired by seed, with its 95 % interval by
Student's t; and the median dropout that runs ended with. Then for each m the mean of log(sketched / whole), with an
interval over the cases (task and start).
"""

from __future__ import annotations

import argparse
import csv
import math
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
from held import BEST
from numpy.typing import NDArray
from scipy import stats
from search_parts import cell
from search_parts.cell import Cell
from search_parts.contender import Contender
from search_parts.contenders.recommended import Recommended
from search_parts.found import all_tasks
from search_parts.sweep import judged
from search_parts.task import Setting, Task
from torch import nn
from torch.optim import Optimizer

import hdet
from hdet.evidence import Contrast
from hdet.recipes.recommended import choose

WRONG = 0.5
TASKS = ("digits_conv", "digits_noise", "ratings", "tabular", "teacher", "denoise", "text_small")


class Whole(Recommended):
    """The recipe as it is: no model here has more parameters than a sketch of its has numbers."""

    name = "whole"
    size: int | None = None

    def knobs(self, model: nn.Module, optimizer: Optimizer, steps: int) -> list[hdet.Knob]:
        chosen = [choice.knob for choice in choose(model, optimizer, steps)]
        return [self.folded(knob) for knob in chosen if isinstance(knob, hdet.Dropout)]

    def folded(self, knob: hdet.Dropout) -> hdet.Dropout:
        """The recipe's knob of dropout, with a sketch of this contender's size."""
        evidence = knob.evidence
        if not isinstance(evidence, Contrast):
            raise TypeError(f"the recipe judges dropout by {evidence}, which has no sketch")
        return knob if self.size is None else knob.replace(evidence=evidence.replace(sketch=self.size))


class Sketched(Whole):
    """The recipe with sketches of 4,096 numbers."""

    name = "sketch of 4096"
    size = 4096


class Small(Whole):
    """The recipe with sketches of 1,024 numbers."""

    name = "sketch of 1024"
    size = 1024


def runs_of(task: Task, contender: Contender, setting: Setting, seeds: int) -> NDArray[np.float64]:
    """[seeds, 2] Test losses, and the dropout that the runs ended with."""
    found = []
    for seed in range(seeds):
        result = cell.run(task, contender, Cell.of(task, contender, setting, seed))
        found.append((judged(task, result.test), result.details.get("peaks", {}).get("dropout", math.nan)))
    return np.array(found)


def interval(differences: NDArray[np.float64]) -> tuple[float, float]:
    """Of the mean, 95 %, by Student's t; of equal differences their own value."""
    error = float(stats.sem(differences))
    mean = float(differences.mean())
    if error == 0.0:
        return mean, mean
    low, high = stats.t.interval(0.95, len(differences) - 1, loc=mean, scale=error)
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=sorted(BEST), default=TASKS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--csv", type=Path, help="file that gets a line a run")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", "the probe is too small")
    rows: list[tuple[object, ...]] = []
    kinds = (Sketched(), Small())
    logarithms: dict[str, list[float]] = {kind.name: [] for kind in kinds}
    print(f"{'task':<14}{'P':>8}{'dropout':>9}{'whole':>9}{'m':>7}{'sketched':>10}{'difference (95 %)':>30}  ended at")
    for name in given.tasks:
        task: Task = all_tasks()[name]
        model = task.problem(0, BEST[name].dropout).model()
        count = sum(p.numel() for p in model.parameters())
        for dropout in (BEST[name].dropout, WRONG):
            setting = replace(BEST[name], dropout=dropout)
            told = {one.name: runs_of(task, one, setting, given.seeds) for one in (Whole(), *kinds)}
            rows += [
                (name, dropout, which, seed, loss, ended)
                for which, runs in told.items()
                for seed, (loss, ended) in enumerate(runs.tolist())
            ]
            whole, ended = told["whole"].T
            for kind in kinds:
                sketched, also_ended = told[kind.name].T
                low, high = interval(sketched - whole)
                logarithms[kind.name].append(float(np.log(sketched / whole).mean()))
                print(
                    f"{name:<14}{count:>8}{dropout:>9g}{whole.mean():>9.4f}{kind.size:>7}{sketched.mean():>10.4f}"
                    f"{(sketched - whole).mean():>+11.4f} ({low:+.4f}, {high:+.4f})"
                    f"{np.median(ended):>8.2f}{np.median(also_ended):>8.2f}",
                    flush=True,
                )
    for title, means in logarithms.items():
        low, high = interval(np.array(means))
        print(f"{title}: log(sketched / whole) over {len(means)} cases {np.mean(means):+.5f} ({low:+.5f}, {high:+.5f})")
    if given.csv:
        with given.csv.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("task", "dropout", "memory", "seed", "test_loss", "ended_with"))
            writer.writerows(rows)


if __name__ == "__main__":
    main()
