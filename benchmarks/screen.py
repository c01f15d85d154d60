"""Which parts of the recipe pay, all judged in the same runs: a fractional factorial of what is left out or changed.

    python benchmarks/screen.py                           # every rule and veto, and what the guard does
    python benchmarks/screen.py --factors "learning_rate: stall" "weight_decay: slope_sum gate=2" --seeds 10 11
    python benchmarks/screen.py --report --csv screen.csv    # of the runs there are

A factor leaves a rule or veto out (`learning_rate: stall`), or changes its numbers (`weight_decay: slope_sum gate=2`)
or of the guard (`guard: overshoot=None`). The rows are those of a two-level design of resolution IV: every factor is
changed in half of them, and its effect is mixed with that of no other factor, and of no two together. So each factor is
judged by all runs, whatever the others do, where `rules.py` leaves out one part at a time. The first row is the recipe.

The effect is the mean loss with the change minus that without, in each block of a task, a start and a seed: below 0 the
change pays. A block that lacks a run is left out. One JSON file a run lies under --out; a run that has its file is not
made again.
"""

from __future__ import annotations

import argparse
import ast
import sys
import warnings
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
from held import BEST
from numpy.typing import NDArray
from rules import PARTS, STARTS, Altered
from search_parts import cell as cells
from search_parts import runner
from search_parts.cell import Cell
from search_parts.found import all_tasks
from search_parts.sweep import judged

from hdet.app.study.cells import content_key
from hdet.controllers import Ruled

ROOT = Path(__file__).parents[1]
TASKS = ("tabular", "teacher", "ratings", "digits_conv", "denoise")
CHOSEN = ("lr x1", "lr x0.1", "lr x10", "lr x30", "decay x0.1", "decay x10")
GUARD = ("guard: significance=100", "guard: overshoot=None")
"""It never goes back; it never begins anew."""

Block = tuple[str, str, int]


class Changed(Altered):
    """The recipe with some factors changed.

    Attributes:
        key: a name of what is changed, in whatever design.
    """

    def __init__(self, factors: Sequence[str]) -> None:
        super().__init__()
        self.key = content_key(sorted(factors))
        for factor in factors:
            owner, _, what = factor.partition(": ")
            part = what.split()[0]
            given = [one.partition("=") for one in what.split() if "=" in one]
            numbers = {name: ast.literal_eval(value) for name, _, value in given}
            if owner not in (*self.tables, "guard") or (owner == "guard" and not numbers):
                raise SystemExit(f"{factor!r} is no change; parts are {PARTS}, a change of the guard is {GUARD[0]!r}")
            if owner == "guard":
                self.guard = self.guard.replace(**numbers) if self.guard is not None else None
            elif numbers:
                self.tables[owner] = _with(self.tables[owner], part, numbers)
            else:
                self.tables[owner] = self.tables[owner].without(part)


def _with(table: Ruled, part: str, numbers: Mapping[str, Any]) -> Ruled:
    """The table with other numbers in one of its rules or vetoes."""
    if part not in [own.kind for own in table.parts]:
        raise SystemExit(f"{table.kind} has no rule or veto {part!r}; it has {[own.kind for own in table.parts]}")
    rules = [rule.replace(**numbers) if rule.kind == part else rule for rule in table.rules]
    vetoes = [veto.replace(**numbers) if veto.kind == part else veto for veto in table.vetoes]
    return table.replace(rules=rules, vetoes=vetoes)


def design(factors: int) -> NDArray[np.bool_]:
    """[rows, factors], whether a row changes a factor: of resolution IV, and the first row changes none.

    Each factor is the sum modulo 2 of an odd number of basic columns: so no two of them make up a third.
    """
    basic = next(n for n in range(1, 64) if 2 ** (n - 1) >= factors)
    columns = [one for size in range(1, basic + 1, 2) for one in combinations(range(basic), size)][:factors]
    rows = np.array(list(product((0, 1), repeat=basic)))
    return np.stack([rows[:, list(one)].sum(axis=1) % 2 == 1 for one in columns], axis=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--factors", nargs="+", metavar="CHANGE", default=[*PARTS, *GUARD], help="see above")
    parser.add_argument("--tasks", nargs="+", choices=sorted(BEST), default=list(TASKS))
    parser.add_argument("--starts", nargs="+", choices=sorted(STARTS), default=list(CHOSEN))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    runner.add_options(parser, ROOT / "runs" / "screen")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", "the probe is too small")
    changed = design(len(given.factors))
    contenders = [Changed([one for one, own in zip(given.factors, row, strict=True) if own]) for row in changed]
    tasks = {name: all_tasks()[name] for name in given.tasks}
    blocks = {
        (task, start, seed): [
            Cell(task, row.key, STARTS[start].setting(BEST[task]), tasks[task].steps, seed) for row in contenders
        ]
        for seed in given.seeds
        for start in given.starts
        for task in tasks
    }
    errors = []
    if not given.report:
        todo = [cell for block in blocks.values() for cell in block]
        by_name = {one.key: one for one in contenders}
        errors = runner.run(todo, tasks, by_name, given.out, jobs=given.jobs, label="rows of the design")
    losses: dict[Block, NDArray[np.float64]] = {}
    for block, runs in blocks.items():
        results = [cells.load(given.out, cell) for cell in runs]
        if all(results):
            losses[block] = np.array([judged(tasks[block[0]], one.test) for one in results if one is not None])
    show(given.factors, changed, losses)
    told = [
        (*block, *map(int, row), loss) for block, own in losses.items() for row, loss in zip(changed, own, strict=True)
    ]
    return runner.finish(errors, given.csv, ["task", "start", "seed", *given.factors, "test_loss"], told)


def show(factors: Sequence[str], changed: NDArray[np.bool_], losses: Mapping[Block, NDArray[np.float64]]) -> None:
    """By factor the mean effect, and the same by start and by task.

    The standard error is over the tasks' means, since a task's blocks are alike; of fewer than three tasks over blocks.
    """
    print(f"{len(losses)} whole blocks of {len(changed)} runs")
    tasks = list(dict.fromkeys(task for task, *_ in losses))
    groups = [*dict.fromkeys(start for _, start, _ in losses), *tasks]
    width = max(len(factor) for factor in factors) + 2
    print("change".ljust(width) + "all".rjust(18) + "".join(name.rjust(13) for name in groups))
    for factor, column in zip(factors, changed.T, strict=True):
        effect = {block: float(own[column].mean() - own[~column].mean()) for block, own in losses.items()}
        if not effect:
            continue
        by_task = [np.mean([own for block, own in effect.items() if block[0] == task]) for task in tasks]
        every = by_task if len(tasks) > 2 else list(effect.values())
        error = np.std(every, ddof=1) / np.sqrt(len(every)) if len(every) > 1 else np.nan
        line = factor.ljust(width) + f"{np.mean(every):+.4f} +- {error:.4f}".rjust(18)
        for name in groups:
            line += f"{np.mean([own for block, own in effect.items() if name in block]):+.4f}".rjust(13)
        print(line)


if __name__ == "__main__":
    sys.exit(main())
