"""What does a run end with? The tail's average beside the last weights, under the recipe and under a fixed schedule.

    python benchmarks/tail.py                                           # eight tasks, three rates, 3 seeds
    python benchmarks/tail.py --tasks tabular --starts "lr x1" --seeds 5
    python benchmarks/tail.py --report --csv tail.csv                   # of the runs there are

Each run is made twice, with `hdet.TailAverage()` and without, for one run's compute, the tail's probes included. The
fixed schedule is a straight line after a warm-up of 30 %, at the rate that the run begins with. Differences are of the
same seed, in nats or mean square error as the task has it: below 0 the run with a tail ends lower. One JSON file a run
lies under --out; a run that has its file is not made again.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from held import BEST, exploring
from rules import STARTS
from search_parts import cell as cells
from search_parts import runner
from search_parts.cell import Cell
from search_parts.contenders.recommended import Recommended
from search_parts.found import all_tasks
from search_parts.sweep import judged
from search_parts.task import Problem, Setting, Task
from torch import nn

import hdet
from hdet.controllers import Hold
from hdet.schedules import LinearDecay

ROOT = Path(__file__).parents[1]
TASKS = ("teacher", "ratings", "tabular", "digits_conv", "denoise", "text_repeated", "text_recurrent", "text_small")
CHOSEN = ("lr x0.1", "lr x1", "lr x10")
Row = tuple[str, str, str, int, float]


class LastWeights(Recommended):
    """The recipe, which ends with its last weights."""

    name = "hdet, last"
    tail = None


class FixedLine(Recommended):
    """A straight line that no window moves, its windows' probes paid for all the same."""

    name = "line"
    guard = None

    def engine(
        self, task: Task, setting: Setting, problem: Problem, model: nn.Module, probe: hdet.Probe, steps: int, seed: int
    ) -> hdet.Engine:
        schedule = LinearDecay(setting.lr, total_steps=steps, warmup=0.3)
        knob = hdet.LearningRate(schedule=schedule, evidence=hdet.evidence.Line(), controller=Hold())
        home = hdet.micro_batches(model, task.optimizer(problem.groups(model), setting), task.micro_batches)
        return exploring(self, home, [knob], probe, steps, seed)


class FixedLineLast(FixedLine):
    """The same, which ends with its last weights."""

    name = "line, last"
    tail = None


PAIRS = {"hdet": "hdet, last", "line": "line, last"}
CONTENDERS = {own.name: own for own in (Recommended(), LastWeights(), FixedLine(), FixedLineLast())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=sorted(BEST), default=list(TASKS))
    parser.add_argument("--starts", nargs="+", choices=sorted(STARTS), default=list(CHOSEN))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="seeds from here on; 60 and 61 it was chosen on")
    runner.add_options(parser, ROOT / "runs" / "tail")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", "the probe is too small")
    tasks = {name: all_tasks()[name] for name in given.tasks}
    places = {
        (name, start, contender, seed): Cell(name, contender, STARTS[start].setting(BEST[name]), task.steps, seed)
        for seed in range(given.first_seed, given.first_seed + given.seeds)
        for name, task in tasks.items()
        for start in given.starts
        for contender in CONTENDERS
    }
    errors = []
    if not given.report:
        errors += runner.run(list(places.values()), tasks, CONTENDERS, given.out, jobs=given.jobs, label="runs")
    rows: list[Row] = [
        (*place, judged(tasks[place[0]], result.test))
        for place, cell in places.items()
        if (result := cells.load(given.out, cell)) is not None
    ]
    show(rows, given.tasks, given.starts)
    return runner.finish(errors, given.csv, ["task", "start", "contender", "seed", "test_loss"], rows)


def show(rows: Sequence[Row], tasks: Sequence[str], starts: Sequence[str]) -> None:
    """By task: what the tail brings each contender over all starts, with a standard error, the worst, and by start."""
    ends = {row[:4]: row[4] for row in rows}
    print(
        f"{'tail, minus last weights':26}{'runs':>6}{'all':>20}{'worst':>9}" + "".join(f"{one:>12}" for one in starts)
    )
    for contender, other in PAIRS.items():
        gained: defaultdict[str, dict[tuple[str, int], float]] = defaultdict(dict)
        for (task, start, own, seed), loss in ends.items():
            if own == contender and (task, start, other, seed) in ends:
                gained[task][start, seed] = loss - ends[task, start, other, seed]
        for task in tasks:
            every = list(gained[task].values())
            if not every:
                continue
            error = np.std(every, ddof=1) / np.sqrt(len(every)) if len(every) > 1 else np.nan
            told = f"{np.mean(every):+.4f} +- {error:.4f}"
            line = f"{contender + ', ' + task:26}{len(every):6}{told:>20}{max(every):+9.4f}"
            by_start = ([value for (at, _), value in gained[task].items() if at == start] for start in starts)
            print(line + "".join(f"{np.mean(own):+12.4f}" if own else f"{'-':>12}" for own in by_start))


if __name__ == "__main__":
    sys.exit(main())
