"""Does the recipe hold over long runs, and short ones? The same settings at 1, 3, 10 and 30 times a task's steps.

    python benchmarks/lengths.py                                              # one seed
    python benchmarks/lengths.py --tasks ratings teacher --lengths 1 3 --seeds 3
    python benchmarks/lengths.py --matrices                                   # a rate for each matrix as well
    python benchmarks/lengths.py --tasks text_small --lengths 0.25 0.5 --seeds 3 --matrices
    python benchmarks/lengths.py --report --csv lengths.csv --figure lengths.png  # of the runs there are

Every length has its own sweep: fixed cosines at .1, .3, 1, 3 and 10 times the rate that is best for one length, for the
same compute. The oracle is the best of them, by its mean over seeds. hdet begins at .1, 1 and 10 times that same rate.
Regret is the test loss above the oracle's of the same seed. One JSON file a run lies under --out; a run that has its
file is not made again.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from held import BEST
from matplotlib.figure import Figure
from search_parts import cell as cells
from search_parts import runner
from search_parts.cell import Cell, Result
from search_parts.found import all_contenders, all_tasks
from search_parts.sweep import judged
from search_parts.task import LEARNING_RATES, SIZES, Start, Task

ROOT = Path(__file__).parents[1]
SWEPT = tuple(start for start in LEARNING_RATES if 0.1 <= start.lr <= 10)


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    task: str
    length: float
    steps: int
    contender: str
    start: Start
    seed: int
    loss: float
    probes: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=sorted(BEST), default=["text_small", "ratings", "teacher"])
    parser.add_argument("--lengths", nargs="+", type=float, default=[1, 3, 10, 30])
    parser.add_argument("--seeds", type=int, default=1)
    runner.add_recipes(parser)
    parser.add_argument("--figure", type=Path, help="where to draw regret against steps")
    runner.add_options(parser, ROOT / "runs" / "lengths")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", "the probe is too small")
    known, contenders = all_tasks(), all_contenders()
    runs, errors = [], []
    for length in given.lengths:
        tasks = {name: replace(known[name], steps=round(length * known[name].steps)) for name in given.tasks}
        plans = {name: list(planned(task, given.seeds, given.recipes)) for name, task in tasks.items()}
        if not given.report:
            wanted = [cell for plan in plans.values() for cell, _ in plan]
            errors += runner.run(wanted, tasks, contenders, given.out, jobs=given.jobs, label=f"{length:g} times")
        for name, plan in plans.items():
            for cell, start in plan:
                result = cells.load(given.out, cell)
                if result is not None:
                    runs.append(finished(tasks[name], length, cell, start, result))
    regrets = against_the_oracle(runs)
    show(runs, regrets)
    code = finish(errors, given.csv, runs)
    if given.figure is not None:
        draw(given.figure, regrets)
    return code


def planned(task: Task, seeds: int, recipes: Sequence[str]) -> Iterator[tuple[Cell, Start]]:
    """Each cell with its start."""
    known = all_contenders()
    for seed in range(seeds):
        for contender, starts in (("cosine", SWEPT), *((recipe, SIZES) for recipe in recipes)):
            for start in starts:
                yield Cell.of(task, known[contender], start.setting(BEST[task.name]), seed), start


def finished(task: Task, length: float, cell: Cell, start: Start, result: Result) -> Run:
    """A cell and how it ended; probes are a share of the run's compute."""
    probes = max(0.0, result.cost - 3 * task.batch * result.details.get("steps", task.steps) / task.budget)
    return Run(task.name, length, task.steps, cell.contender, start, cell.seed, judged(task, result.test), probes)


def finish(errors: Sequence[str], path: Path | None, runs: Sequence[Run], **alike: object) -> int:
    """As `runner.finish`, of these runs; `alike` are columns in which they do not differ."""
    columns = ["task", "steps", "contender", "start", "seed", "test_loss", "probes", *alike]
    rows = [
        (run.task, run.steps, run.contender, run.start.name, run.seed, run.loss, f"{run.probes:.4f}", *alike.values())
        for run in runs
    ]
    return runner.finish(errors, path, columns, rows)


def against_the_oracle(runs: Sequence[Run]) -> list[tuple[Run, float]]:
    """Every run with its regret, where the oracle of its task, length and seed is there."""
    swept = defaultdict(list)
    for run in runs:
        if run.contender == "cosine":
            swept[run.task, run.length, run.start].append(run.loss)
    best: dict[tuple[str, float], Start] = {}
    for task, length, start in sorted(swept, key=lambda key: float(np.mean(swept[key]))):
        best.setdefault((task, length), start)
    oracle = {
        (run.task, run.length, run.seed): run.loss
        for run in runs
        if run.contender == "cosine" and run.start == best[run.task, run.length]
    }
    keyed = [(run, (run.task, run.length, run.seed)) for run in runs]
    return [(run, run.loss - oracle[key]) for run, key in keyed if key in oracle]


def show(runs: Sequence[Run], regrets: Sequence[tuple[Run, float]]) -> None:
    """Mean regret by task, length and start, the worst seed's in brackets."""
    columns = [(who, start) for who in dict.fromkeys(run.contender for run in runs) for start in SIZES]
    titles = "".join(f"{who}, {start.name}".rjust(24) for who, start in columns)
    print("task".ljust(14) + "steps".rjust(8) + "oracle".rjust(9) + "rate".rjust(7) + titles + "probes".rjust(9))
    for task, length, steps in dict.fromkeys((run.task, run.length, run.steps) for run in runs):
        own = [(run, regret) for run, regret in regrets if (run.task, run.length) == (task, length)]
        oracles = [run for run, regret in own if run.contender == "cosine" and regret == 0.0]
        if not oracles:
            continue
        rate = f"x{oracles[0].start.lr:g}"
        line = f"{task:14}{steps:8}{np.mean([run.loss for run in oracles]):9.3f}{rate:>7}"
        for column in columns:
            found = [regret for run, regret in own if (run.contender, run.start) == column]
            line += (f"{np.mean(found):+.3f} ({max(found):+.3f})" if found else "-").rjust(24)
        probes = [run.probes for run, _ in own if run.contender == "hdet"]
        print(line + (f"{np.mean(probes):.1%}" if probes else "-").rjust(9))


def draw(path: Path, regrets: Sequence[tuple[Run, float]]) -> None:
    """Regret against the length of the run: a panel a task, a line a start."""
    tasks = list(dict.fromkeys(run.task for run, _ in regrets))
    figure = Figure(figsize=(3.6 * len(tasks), 3.2), layout="constrained")
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    for axes, task in zip(panels, tasks, strict=True):
        for contender, style in (("hdet", "o-"), ("hdet_matrices", "s--"), ("cosine", "x:")):
            for number, start in enumerate(SIZES):
                points = defaultdict(list)
                for run, regret in regrets:
                    if (run.task, run.contender, run.start) == (task, contender, start):
                        points[run.steps].append(regret)
                steps = sorted(points)
                means = [np.mean(points[step]) for step in steps]
                if steps:
                    axes.plot(steps, means, style, color=f"C{number}", label=f"{contender}, {start.name}")
        ticks = sorted({run.steps for run, _ in regrets if run.task == task})
        axes.set(xscale="log", xlabel="steps", title=task)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_yscale("symlog", linthresh=0.02)
        axes.axhline(0.0, color="0.7", linewidth=0.8)
    panels[0].set_ylabel("test loss above the best fixed rate's")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize=7)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
