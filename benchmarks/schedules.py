"""Which schedule to give the recipe: its own straight line, cosines with warm-ups of several lengths, a plateau.

    python benchmarks/schedules.py --jobs 2
    python benchmarks/schedules.py --jobs 2 --matrices            # a rate for each matrix as well
    python benchmarks/schedules.py --report --csv schedules.csv   # of the runs there are

The recipe drives the learning rate along each, from a tenth of, at and ten times the best fixed rate. It lengthens a
warm-up that is too short; "as given" does not (`warmup_steps=0`). Beside it is the same schedule without hdet, at that
start. Regret is the test loss above that of the search benchmark's fixed cosine at the best rate, of the same seed.
One JSON file a run lies under --out; a run that has its file is not made again.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from held import BEST
from search_parts import cell as cells
from search_parts import runner
from search_parts.cell import Cell
from search_parts.contender import Contender
from search_parts.contenders.recommended import Recommended
from search_parts.contenders.recommended_matrices import RecommendedMatrices
from search_parts.fixed import Fixed
from search_parts.found import all_contenders, all_tasks
from search_parts.outcome import FIXED
from search_parts.sweep import judged
from search_parts.task import RIGHT, SIZES, Setting, Task

from hdet.schedules import WSD, Cosine, LinearDecay, OneCycle, Schedule

ROOT = Path(__file__).parents[1]
TASKS = ("teacher", "ratings", "tabular", "digits_conv", "denoise", "clusters", "text_small", "text_recurrent")
SHAPES: dict[str, Callable[[float, int], Schedule]] = {
    "line, warm-up of 30 %": lambda peak, steps: LinearDecay(peak, total_steps=steps, warmup=0.3),
    "OneCycle, warm-up of 30 %": lambda peak, steps: OneCycle(peak, total_steps=steps),
    "cosine, warm-up of 10 %": lambda peak, steps: Cosine(peak, total_steps=steps, warmup=0.1),
    "cosine, warm-up of 3 %": lambda peak, steps: Cosine(peak, total_steps=steps, warmup=0.03),
    "cosine, no warm-up": lambda peak, steps: Cosine(peak, total_steps=steps, warmup=0.0),
    "plateau, warm-up of 10 %": lambda peak, steps: WSD(peak, total_steps=steps, warmup=0.1, decay=0.2),
}
SHORT = [shape for shape in SHAPES if "30 %" not in shape]
"""Those whose warm-up the recipe lengthens."""
Row = tuple[str, str, str, int, float]


class Along(Recommended):
    """The recipe along a schedule, in as many steps as along its own: probes hardly depend on it."""

    own: Recommended = Recommended()

    def __init__(self, shape: str, warmup_steps: int | None = None) -> None:
        self.shape = shape
        self.warmup_steps = warmup_steps

    def affordable_steps(self, task: Task, setting: Setting) -> int:
        return self.own.affordable_steps(task, setting)

    def schedule(self, peak: float, steps: int) -> Schedule:
        return SHAPES[self.shape](peak, steps)


class AlongMatrices(Along, RecommendedMatrices):
    """The same with a rate for each matrix."""

    own = RecommendedMatrices()


KINDS: dict[str, type[Along]] = {"hdet": Along, "hdet_matrices": AlongMatrices}


class Alone(Fixed):
    """The schedule without hdet."""

    def __init__(self, shape: str) -> None:
        self.shape = shape

    def schedule(self, peak: float, steps: int) -> Schedule:
        return SHAPES[self.shape](peak, steps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=sorted(BEST), default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=2)
    runner.add_recipes(parser)
    runner.add_options(parser, ROOT / "runs" / "schedules")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", "the probe is too small")
    tasks = {name: all_tasks()[name] for name in given.tasks}
    contenders: dict[str, Contender] = {FIXED: all_contenders()[FIXED]}
    for shape in SHAPES:
        contenders[f"fixed: {shape}"] = Alone(shape)
    for recipe in given.recipes:
        contenders |= {f"{recipe}: {shape}": KINDS[recipe](shape) for shape in SHAPES}
        contenders |= {f"{recipe} as given: {shape}": KINDS[recipe](shape, warmup_steps=0) for shape in SHORT}
    wanted = {
        (name, start.name, who, seed): Cell(name, who, start.setting(BEST[name]), task.steps, seed)
        for seed in range(given.seeds)
        for name, task in tasks.items()
        for who in contenders
        for start in ([RIGHT] if who == FIXED else SIZES)
    }
    errors = []
    if not given.report:
        errors = runner.run(list(wanted.values()), tasks, contenders, given.out, jobs=given.jobs, label="schedules")
    rows = [
        (*place, judged(tasks[place[0]], result.test))
        for place, cell in wanted.items()
        if (result := cells.load(given.out, cell)) is not None
    ]
    show(rows, given.tasks)
    return runner.finish(errors, given.csv, ["task", "start", "contender", "seed", "test_loss"], rows)


def show(rows: Sequence[Row], tasks: Sequence[str]) -> None:
    """Mean regret by schedule and start, with a standard error over runs, and by task."""
    best = {(task, seed): loss for task, _, contender, seed, loss in rows if contender == FIXED}
    print(" " * 50 + "start".rjust(9) + "all".rjust(20) + "".join(task.rjust(13) for task in tasks))
    kinds = ["fixed", *(f"{recipe}{given}" for recipe in KINDS for given in ("", " as given"))]
    for who in [f"{kind}: {shape}" for kind in kinds for shape in SHAPES]:
        for start in SIZES:
            lost = [
                (task, loss - best[task, seed])
                for task, begun, contender, seed, loss in rows
                if (contender, begun) == (who, start.name) and (task, seed) in best
            ]
            if not lost:
                continue
            every = [value for _, value in lost]
            error = np.std(every, ddof=1) / np.sqrt(len(every)) if len(every) > 1 else np.nan
            own = [[value for name, value in lost if name == task] for task in tasks]
            line = who.ljust(50) + start.name.rjust(9) + f"{np.mean(every):+.4f} +- {error:.4f}".rjust(20)
            print(line + "".join((f"{np.mean(values):+.4f}" if values else "-").rjust(13) for values in own))


if __name__ == "__main__":
    sys.exit(main())
