"""Does the recipe hold with size? Byte GPTs of 0.06 to 2.7 million parameters (gpt_10m by --tasks), from three rates.

    python benchmarks/sizes.py                                            # one seed; 2.7 million take most of the time
    python benchmarks/sizes.py --tasks tabular teacher ratings --seeds 5  # the same starts on other tasks
    python benchmarks/sizes.py --matrices                                 # a rate for each matrix as well
    python benchmarks/sizes.py --report --figure sizes.png                # of the runs there are

Runs start at a tenth of, at and ten times the best fixed rate that was found. Regret is the test loss above that of
the fixed cosine schedule at that rate, of the same seed and for the same compute. One JSON file a run lies under --out;
a run that has its file is not made again. --csv writes every run's loss.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from held import BEST
from matplotlib.figure import Figure
from search_parts import cell as cells
from search_parts import runner
from search_parts.cell import Cell
from search_parts.found import all_contenders, all_tasks
from search_parts.sweep import judged
from search_parts.task import RIGHT, SIZES, Task

ROOT = Path(__file__).parents[1]
GPTS = ("text_small", "gpt_400k", "gpt_3m")
Row = tuple[str, str, str, int, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=sorted(BEST), default=list(GPTS))
    parser.add_argument("--seeds", type=int, default=1)
    runner.add_recipes(parser)
    parser.add_argument("--figure", type=Path, help="where to draw regret against the number of parameters")
    runner.add_options(parser, ROOT / "runs" / "sizes")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", "the probe is too small")
    tasks, contenders = all_tasks(), all_contenders()
    wanted = [cell for name in given.tasks for cell, *_ in planned(tasks[name], given.seeds, given.recipes)]
    errors = [] if given.report else runner.run(wanted, tasks, contenders, given.out, jobs=given.jobs, label="sizes")
    rows = [row for name in given.tasks for row in finished(tasks[name], given.seeds, given.out, given.recipes)]
    show(rows, given.tasks, given.recipes)
    if given.figure is not None:
        draw(given.figure, rows)
    return runner.finish(errors, given.csv, ["task", "start", "contender", "seed", "test_loss"], rows)


def planned(task: Task, seeds: int, recipes: Sequence[str]) -> Iterator[tuple[Cell, str, str]]:
    """Each cell with the names of its start and its contender."""
    known = all_contenders()
    for seed in range(seeds):
        for contender, starts in (("cosine", [RIGHT]), ("linear", [RIGHT]), *((recipe, SIZES) for recipe in recipes)):
            for start in starts:
                yield Cell.of(task, known[contender], start.setting(BEST[task.name]), seed), start.name, contender


def finished(task: Task, seeds: int, folder: Path, recipes: Sequence[str]) -> Iterator[Row]:
    """The runs that have their file."""
    for cell, start, contender in planned(task, seeds, recipes):
        result = cells.load(folder, cell)
        if result is not None:
            yield task.name, start, contender, cell.seed, judged(task, result.test)


def regrets(rows: list[Row], name: str, contender: str, start: str) -> list[float]:
    """Of the seeds of a task whose fixed cosine is there."""
    fixed = {seed: loss for task, _, who, seed, loss in rows if (task, who) == (name, "cosine")}
    return [
        loss - fixed[seed]
        for task, begun, who, seed, loss in rows
        if (task, begun, who) == (name, start, contender) and seed in fixed
    ]


def show(rows: list[Row], names: list[str], recipes: Sequence[str]) -> None:
    """Mean regret and its standard error, and the worst seed's in brackets."""
    columns = [("linear", RIGHT.name), *((recipe, start.name) for recipe in recipes for start in SIZES)]
    print("task".ljust(14) + "fixed cosine".rjust(14) + "".join(f"{who}, {start}".rjust(26) for who, start in columns))
    for name in names:
        own = [loss for task, _, who, _, loss in rows if (task, who) == (name, "cosine")]
        line = name.ljust(14) + (f"{np.mean(own):.3f} ({len(own)})".rjust(14) if own else "-".rjust(14))
        for who, start in columns:
            found = regrets(rows, name, who, start)
            error = np.std(found, ddof=1) / len(found) ** 0.5 if len(found) > 1 else np.nan
            line += (f"{np.mean(found):+.3f} +- {error:.3f} ({max(found):+.3f})" if found else "-").rjust(26)
        print(line)


def draw(path: Path, rows: list[Row]) -> None:
    """Regret against the number of parameters: a line a start, a point a seed."""
    tasks = all_tasks()
    sizes = {
        name: sum(own.numel() for own in tasks[name].problem(0, 0.0).model().parameters())
        for name in dict.fromkeys(task for task, *_ in rows)
    }
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for number, (who, start) in enumerate([("hdet", start.name) for start in SIZES] + [("linear", RIGHT.name)]):
        told = {name: regrets(rows, name, who, start) for name in sorted(sizes, key=lambda name: sizes[name])}
        points = [(sizes[name], regret) for name, found in told.items() for regret in found]
        means = [(sizes[name], np.mean(found)) for name, found in told.items() if found]
        if not means:
            continue
        title = f"hdet, {start}" if who == "hdet" else "fixed straight line, lr x1"
        axes.plot(*zip(*points, strict=True), ".", color=f"C{number}", alpha=0.6)
        axes.plot(*zip(*means, strict=True), "-" if who == "hdet" else ":", color=f"C{number}", label=title)
    axes.axhline(0.0, color="0.7", linewidth=0.8)
    axes.set(xscale="log", xlabel="parameters", ylabel="test loss above a fixed cosine's,\nat the best rate found")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
