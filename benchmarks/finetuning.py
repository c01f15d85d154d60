"""Does the recipe hold in fine-tuning? A pretrained byte GPT, all weights and LoRA, from rates 0.01x to 30x.

    python benchmarks/finetuning.py                       # two seeds, about 20 minutes on one core
    python benchmarks/finetuning.py --jobs 2 --csv f.csv
    python benchmarks/finetuning.py --matrices            # a rate for each matrix as well
    python benchmarks/finetuning.py --first-seed 40 --seeds 4  # seeds that nothing was chosen on
    python benchmarks/finetuning.py --report              # of the runs there are

No dropout is right here. Each rate is given with that, and with the wrong one of the task; then the task's wrong decays
and dropouts. Regret is the test loss above the best of three fixed cosines without dropout, by its mean over seeds.
One JSON file a run lies under --out; a run that has its file is not made again.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from held import BEST
from search_parts import cell as cells
from search_parts import runner
from search_parts.cell import Cell
from search_parts.found import all_contenders, all_tasks
from search_parts.sweep import judged
from search_parts.task import LEARNING_RATES, Task

ROOT = Path(__file__).parents[1]
TASKS = ("finetune_full", "finetune_lora")
SWEPT = (0.5, 1.0, 2.0)
COLUMNS = ["task", "contender", "start", "lr", "decay", "dropout", "seed", "test_loss"]
Row = tuple[str, str, str, float, float, float, int, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    runner.add_recipes(parser)
    runner.add_options(parser, ROOT / "runs" / "finetuning")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", "the probe is too small")
    tasks = {name: all_tasks()[name] for name in given.tasks}
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    plans = {name: list(planned(task, seeds, given.recipes)) for name, task in tasks.items()}
    wanted = [cell for plan in plans.values() for cell, _ in plan]
    contenders = all_contenders()
    errors = [] if given.report else runner.run(wanted, tasks, contenders, given.out, jobs=given.jobs, label="tuning")
    rows = [row for name, plan in plans.items() for row in finished(tasks[name], plan, given.out)]
    for name in given.tasks:
        show(name, [row for row in rows if row[0] == name])
    return runner.finish(errors, given.csv, COLUMNS, rows)


def planned(task: Task, seeds: Sequence[int], recipes: Sequence[str]) -> Iterator[tuple[Cell, str]]:
    """Each cell with what it is called: the fixed runs of the oracle, then each recipe's."""
    known, best = all_contenders(), BEST[task.name]
    right = replace(best, dropout=0.0)
    for seed in seeds:
        for factor in SWEPT:
            yield Cell.of(task, known["cosine"], replace(right, lr=factor * best.lr), seed), f"fixed x{factor:g}"
        for recipe in recipes:
            for start in LEARNING_RATES:
                yield Cell.of(task, known[recipe], start.setting(right), seed), f"{start.name}, no dropout"
            for start in task.starts:
                yield Cell.of(task, known[recipe], start.setting(best), seed), start.name


def finished(task: Task, plan: list[tuple[Cell, str]], folder: Path) -> Iterator[Row]:
    """The runs that have their file."""
    for cell, name in plan:
        result = cells.load(folder, cell)
        if result is not None:
            own = cell.setting
            loss = judged(task, result.test)
            yield task.name, cell.contender, name, own.lr, own.decay, own.dropout, cell.seed, loss


def show(name: str, rows: list[Row]) -> None:
    """Mean loss and regret of each start, and the worst seed's regret."""
    losses: dict[tuple[str, str], list[float]] = {}
    for _, contender, start, *_, loss in rows:
        losses.setdefault((contender, start), []).append(loss)
    fixed = {start: float(np.mean(own)) for (contender, start), own in losses.items() if contender == "cosine"}
    if not fixed:
        return
    oracle = min(fixed, key=lambda start: fixed[start])
    print(f"\n{name}: the best fixed run without dropout is {oracle}, {fixed[oracle]:.4f}")
    print(f"{'contender':14s} {'start':24s} {'loss':>8s} {'regret':>8s} {'worst':>8s}")
    for (contender, start), own in losses.items():
        if contender != "cosine":
            regrets = np.array(own) - fixed[oracle]
            print(f"{contender:14s} {start:24s} {np.mean(own):8.4f} {regrets.mean():+8.4f} {regrets.max():+8.4f}")


if __name__ == "__main__":
    sys.exit(main())
