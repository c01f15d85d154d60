"""`hdet.find` against the learning-rate range test: a rate for the run, found beforehand and charged to its budget.

    python benchmarks/find.py                                     # six tasks, 3 seeds, starts of .1x, 1x and 10x
    python benchmarks/find.py --tasks text_momentum --seeds 5
    python benchmarks/find.py --report                            # the tables of the runs there are
    python benchmarks/find.py --lengths                           # the best rate by the length of runs
    python benchmarks/find.py --regularisers                      # what short runs say of weight decay and dropout

Every row gets one training run's compute. Regret is the test loss above that of the fixed cosine at the best rate of a
sweep, of the same seed and for the same compute. A range test does not depend on the start. One JSON file a run lies
under --out; a run that has its file is not made again. --csv writes every run's loss.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from held import BEST
from search_parts import cell as cells
from search_parts import runner, sweep
from search_parts.cell import Cell, Result
from search_parts.contender import Contender
from search_parts.contenders.find_then_train import FindThenTrain
from search_parts.found import all_contenders, all_tasks
from search_parts.range_test import RangeTest
from search_parts.sweep import judged
from search_parts.task import SIZES, Setting, Task

import hdet

ROOT = Path(__file__).parents[1]
TASKS = ("teacher", "digits_conv", "digits_noise", "ratings", "tabular", "denoise")
NEAR = 2.0
SHORTER = (50, 10, 1)
FACTORS = tuple(2.0**k for k in range(-5, 7))


class Uncorrected(FindThenTrain):
    """At the best rate of the trials, as if the run were as short."""

    name = "find_uncorrected"
    title = "hdet find, not lowered, then cosine"
    order = 3

    def rate(self, estimate: hdet.trials.RateEstimate) -> float:
        return estimate.at_trial_length.rate


def rows() -> dict[str, Contender]:
    known = all_contenders()
    tests = [
        RangeTest(rule, schedule) for rule in ("valley", "steepest", "tenth") for schedule in ("onecycle", "cosine")
    ]
    own = [known["cosine"], known["onecycle"], known["find"], Uncorrected(), known["hdet"], *tests]
    return {contender.name: contender for contender in own}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=sorted(BEST), default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    runner.add_options(parser, ROOT / "runs" / "find")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--regularisers", action="store_true", help="instead: decay and dropout in runs of 1/50, 1/10, 1"
    )
    instead.add_argument("--lengths", action="store_true", help="instead: the best rate by the length of runs")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", "the probe is too small")
    tasks = {name: all_tasks()[name] for name in given.tasks}
    if given.regularisers:
        for task in tasks.values():
            show_regularisers(task, given.seeds)
        return 0
    if given.lengths:
        for task in tasks.values():
            show_lengths(task, given.seeds)
        return 0
    contenders = rows()
    wanted = [cell for task in tasks.values() for cell, _ in planned(task, contenders, given.seeds)]
    errors = [] if given.report else runner.run(wanted, tasks, contenders, given.out, jobs=given.jobs, label="find")
    results: dict[tuple[str, str, str, int], Result] = {}
    for task in tasks.values():
        for cell, start in planned(task, contenders, given.seeds):
            result = cells.load(given.out, cell)
            if result is not None:
                results[task.name, start, cell.contender, cell.seed] = result
    show(results, tasks, contenders, given.seeds)
    show_intervals(results)
    told = [
        (*key, result.test, None if (rate := result.details.get("lr")) is None else f"{rate:.4g}")
        for key, result in results.items()
    ]
    return runner.finish(errors, given.csv, ["task", "start", "contender", "seed", "test_loss", "lr"], told)


def planned(task: Task, contenders: Mapping[str, Contender], seeds: int) -> Iterator[tuple[Cell, str]]:
    """Each cell with the name of its start."""
    for seed in range(seeds):
        for start in SIZES:
            for contender in contenders.values():
                yield Cell.of(task, contender, start.setting(BEST[task.name]), seed), start.name


def show(
    results: Mapping[tuple[str, str, str, int], Result],
    tasks: Mapping[str, Task],
    contenders: Mapping[str, Contender],
    seeds: int,
) -> None:
    """Mean regret by start over all tasks and the worst of all, then by task over all starts."""
    columns = [start.name for start in SIZES] + list(tasks)
    print("regret".ljust(40) + "".join(column.rjust(13) for column in columns) + "worst".rjust(9) + "failed".rjust(8))
    for contender in contenders.values():
        found: dict[str, list[float]] = {column: [] for column in columns}
        failed = 0
        for (name, start, who, seed), result in results.items():
            oracle = results.get((name, "lr x1", "cosine", seed))
            if who == contender.name and oracle is not None:
                task = tasks[name]
                regret = judged(task, result.test) - judged(task, oracle.test)
                failed += sweep.failed(task, result.test)
                for column in (start, name):
                    found[column].append(regret)
        if not all(found.values()):
            continue
        line = "".join(f"{np.mean(found[column]):+13.3f}" for column in columns)
        worst = max(max(values) for values in found.values())
        print(contender.title.ljust(40) + line + f"{worst:+9.3f}{failed:8d}")


def show_intervals(results: Mapping[tuple[str, str, str, int], Result]) -> None:
    """How often the best rate of the sweep lies in the interval that was given, by verdict."""
    groups: dict[str, list[tuple[bool, bool, float]]] = {}
    for (name, _, who, _), result in results.items():
        if who == "find" and "lr" in result.details:
            told, best = result.details, BEST[name].lr
            low, high = told["low"] or 0.0, told["high"] or math.inf
            near = abs(math.log(told["lr"] / best)) <= math.log(NEAR)
            groups.setdefault(told["verdict"], []).append((low <= best <= high, near, high / low if low else math.inf))
    print("\nverdict".ljust(17) + "runs".rjust(6) + "best inside".rjust(13) + "within x2".rjust(11) + "width".rjust(9))
    for verdict, group in sorted(groups.items()):
        inside, close, widths = zip(*group, strict=True)
        width = f"x{np.median(widths):.3g}"
        print(f"{verdict:16}{len(group):6d}{np.mean(inside):13.0%}{np.mean(close):11.0%}{width:>9}")


def show_regularisers(task: Task, seeds: int) -> None:
    """Test loss less that of the best setting's, for decay and dropout set otherwise, in runs of several lengths."""
    best, fixed = BEST[task.name], all_contenders()["cosine"]
    others: dict[str, Setting] = {f"decay x{f:g}": replace(best, decay=best.decay * f) for f in (0.1, 10)}
    others |= {f"dropout {p:g}": replace(best, dropout=p) for p in (0.0, 0.15, 0.3, 0.5) if p != best.dropout}
    print(f"\n{task.name}: best decay {best.decay:g}, dropout {best.dropout:g}")
    for part in SHORTER:
        short = replace(task, steps=max(1, task.steps // part))
        base = sweep.losses(short, fixed, best, range(seeds))
        told = {name: sweep.losses(short, fixed, one, range(seeds)) - base for name, one in others.items()}
        line = "".join(
            f"  {name} {gap.mean():+.3f} +- {gap.std(ddof=1) / seeds**0.5:.3f}" for name, gap in told.items()
        )
        print(f"1/{part} of the run".ljust(18) + line)


def show_lengths(task: Task, seeds: int) -> None:
    """The test loss above the lowest by the rate over the best of the sweep, in runs of several lengths."""
    best, fixed = BEST[task.name], all_contenders()["cosine"]
    print(f"\n{task.name}: rate over {best.lr:g}".ljust(30) + "".join(f"{factor:9g}" for factor in FACTORS))
    for part in SHORTER:
        short = replace(task, steps=max(1, task.steps // part))
        found = [sweep.losses(short, fixed, replace(best, lr=best.lr * f), range(seeds)).mean() for f in FACTORS]
        print(f"1/{part} of the run".ljust(29) + "".join(f"{loss - min(found):9.3f}" for loss in found))


if __name__ == "__main__":
    sys.exit(main())
