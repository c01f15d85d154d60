"""Does every rule pay? The recipe beside itself with one rule or veto, or the guard, left out.

    python benchmarks/rules.py                                        # six tasks, six starts, 2 seeds
    python benchmarks/rules.py --tasks teacher --starts "lr x1" --seeds 5
    python benchmarks/rules.py --rates matrices                       # a rate for each matrix, as by default
    python benchmarks/rules.py --tasks finetune_full --parts "learning_rate: lower's proof in fine-tuning"
    python benchmarks/rules.py --tasks finetune_full finetune_lora --parts "dropout: margin in fine-tuning"
    python benchmarks/rules.py --tasks digits_noise --starts "nine 3" --parts "dropout: entered far below a half"
    python benchmarks/rules.py --together "weight_decay: leap" "weight_decay: needs_gap"
                                                                      # without both
    python benchmarks/rules.py --report --csv rules.csv               # of the runs there are

A part that neither asked for a move nor held one back in a run of the recipe cannot have changed it, so that run is
not made again without it. Differences are of the same seed, in nats or mean square error as the task has it: above 0
the recipe ends higher without the part, so the part pays. One JSON file a run lies under --out; a run that has its file
is not made again.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
from held import BEST
from search_parts import cell as cells
from search_parts import runner
from search_parts.cell import Cell
from search_parts.contender import Outcome
from search_parts.contenders.recommended import Recommended
from search_parts.contenders.recommended_matrices import RecommendedMatrices
from search_parts.found import all_tasks
from search_parts.meter import Meter
from search_parts.sweep import judged
from search_parts.task import ALL_OFF, DECAYS, LEARNING_RATES, NINE, Setting, Task
from torch import nn
from torch.optim import Optimizer

import hdet
from hdet.controllers import Controller, Pooled, Regularize, Ruled
from hdet.evidence.parts import two_levels
from hdet.recipes import recommended
from hdet.recipes.recommended import ALONG_A_LINE, choose

ROOT = Path(__file__).parents[1]
TASKS = ("teacher", "ratings", "tabular", "digits_conv", "denoise", "text_small")
STARTS = {start.name: start for start in LEARNING_RATES + DECAYS + ALL_OFF + NINE}
CHOSEN = ("lr x0.1", "lr x1", "lr x10", "lr x30", "decay x0.1", "decay x10")
TABLES: dict[str, Ruled] = {"learning_rate": ALONG_A_LINE, "weight_decay": Regularize()}
PARTS = [f"{knob}: {part.kind}" for knob, table in TABLES.items() for part in table.parts]
AND = " and "
FALL, LIMIT, MISLED = "learning_rate: fall", "learning_rate: return's limit", "learning_rate: catch_up's misled_to"
TINIEST, LARGEST = "learning_rate: catch_up's tiny", "learning_rate: large_steps from twice the weights on"
PROOF, ENTERED = "learning_rate: lower's proof in fine-tuning", "learning_rate: return as entered in fine-tuning"
QUIET = "learning_rate: return of what evidence lowered"
WRECK = "learning_rate: small steps that wreck"
LATE = "weight_decay: larger late moves of what is costly"
NUMBERS: dict[str, tuple[Sequence[str], dict[str, float]]] = {
    LIMIT: (["return"], {"small": 0.0}),
    MISLED: (["catch_up"], {"misled_to": 0.0}),
    TINIEST: (["catch_up"], {"tiny": 0.03}),
    LARGEST: (["large_steps"], {"large": 4.0}),
    PROOF: (["lower"], {"pretrained_significance": 3.0}),
    ENTERED: (["return"], {"entered_significance": 2.0}),
    QUIET: (["return"], {"quiet_windows": 1000}),
    WRECK: (["regain", "small_steps"], {"wrecked": 1e300}),
    LATE: (["slope_sum"], {"late_costly": 1e300}),
}
"""Rules and vetoes that stay, and the numbers that leave out a part of what they do."""
DROPOUT = {
    "dropout: margin in fine-tuning": ("margin", two_levels.MARGIN),
    "dropout: entered far below a half": ("entered", recommended.MOST),
    "dropout: to 0 from near it in fine-tuning": ("reach", 0.0),
}
"""What is decided of dropout, and which of a contender's numbers leaves it out."""
SAID_BY = {
    MISLED: "learning_rate: catch_up",
    TINIEST: "learning_rate: catch_up",
    LARGEST: "learning_rate: large_steps",
    ENTERED: "learning_rate: return",
    QUIET: "learning_rate: return",
    LATE: "weight_decay: slope_sum",
}
"""Without these numbers a rule asks for less, so where it was silent, they had no say."""
SPARED = ("weight_decay: spare", "weight_decay: keeps_weights")
ANY_RUN = {FALL, LIMIT, PROOF, WRECK, *DROPOUT}
"""They ask for no move of their own, and may have a say in any run."""
TURNS: dict[str, hdet.Rewind | None] = {"guard: rewound": None, "guard: restarted": hdet.Rewind(overshoot=None)}
"""What the guard does, and the guard that does not: without one there is no new start either."""
LEFT_OUT = [*PARTS, *NUMBERS, *TURNS, *DROPOUT]
IN_ANY_TRAINING = [part for part in LEFT_OUT if part not in (PROOF, ENTERED, *SPARED, *DROPOUT)]

RATES: dict[str, type[Recommended]] = {"one": Recommended, "matrices": RecommendedMatrices}

Row = tuple[str, str, str, int, float, bool]


class Altered(Recommended):
    """The recipe with other tables of rules and vetoes, and as many steps as the recipe has.

    Args:
        rates: one learning rate, or one for each of the `matrices`.

    Attributes:
        tables: by knob; that of the learning rate is also what all rates have in common.
        margin: by how much held-out loss exceeds training loss where fine-tuning tries a dropout of 0.
        entered: the dropout at which a run begins that was given one above a half.
        reach: from how near 0 a dropout goes there in fine-tuning; None as the library has it.
    """

    def __init__(self, rates: str = "one") -> None:
        self.recipe = RATES[rates]()
        self.tables = dict(TABLES)
        self.margin = two_levels.FINE_TUNING_MARGIN
        self.entered = recommended.ENTERED
        self.reach: float | None = None

    def run(self, task: Task, setting: Setting, seed: int, meter: Meter) -> Outcome:
        entered = patch.object(recommended, "ENTERED", self.entered)
        with patch.object(two_levels, "FINE_TUNING_MARGIN", self.margin), entered:
            return super().run(task, setting, seed, meter)

    def affordable_steps(self, task: Task, setting: Setting) -> int:
        return self.recipe.affordable_steps(task, setting)

    def knobs(self, model: nn.Module, optimizer: Optimizer, steps: int) -> Sequence[hdet.Knob]:
        own = self.recipe.knobs(model, optimizer, steps)
        exclude = ["learning_rate"] if own else []
        others = choose(model, optimizer, steps, exclude=exclude)
        knobs = [*own, *(choice.knob for choice in others if choice.knob is not None)]
        found = [knob.replace(controller=self.table(knob)) for knob in knobs if knob.label.split("[")[0] in self.tables]
        if self.reach is not None:
            dropouts = [knob for knob in knobs if isinstance(knob, hdet.Dropout)]
            found += [
                knob.replace(controller=knob.default_controller.replace(pretrained_reach=self.reach))
                for knob in dropouts
            ]
        return found

    def table(self, knob: hdet.Knob) -> Controller:
        """That of a knob's sort; for one of many rates within what keeps them apart."""
        table = self.tables[knob.label.split("[")[0]]
        return knob.controller.replace(common=table) if isinstance(knob.controller, Pooled) else table


class Without(Altered):
    """The recipe with some parts left out."""

    def __init__(self, left_out: str, rates: str = "one") -> None:
        super().__init__(rates)
        for part in left_out.split(AND):
            if part in TURNS:
                self.guard = TURNS[part]
                continue
            if part in DROPOUT:
                setattr(self, *DROPOUT[part])
                continue
            owner, _, kind = part.partition(": ")
            table = self.tables[owner]
            if part in NUMBERS:
                kinds, numbers = NUMBERS[part]
                changed = {
                    field: tuple(one.replace(**numbers) if one.kind in kinds else one for one in own)
                    for field, own in {"rules": table.rules, "vetoes": table.vetoes}.items()
                }
                self.tables[owner] = table.replace(**changed)
            else:
                self.tables[owner] = table.without(kind)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=sorted(BEST), default=list(TASKS))
    parser.add_argument("--starts", nargs="+", choices=sorted(STARTS), default=list(CHOSEN))
    parser.add_argument("--parts", nargs="+", choices=LEFT_OUT, default=IN_ANY_TRAINING)
    parser.add_argument("--together", nargs="+", choices=LEFT_OUT, help="instead, all of these at once")
    parser.add_argument("--rates", choices=list(RATES), default="one", help="runs of each lie in a folder of their own")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0, help="seeds from here on: below 5 the recipe was chosen")
    runner.add_options(parser, ROOT / "runs" / "rules")
    given = parser.parse_args()
    given.out = given.out / given.rates
    warnings.filterwarnings("ignore", "the probe is too small")
    parts = [AND.join(given.together)] if given.together else given.parts
    tasks = {name: all_tasks()[name] for name in given.tasks}
    contenders = {"hdet": RATES[given.rates](), **{part: Without(part, given.rates) for part in parts}}
    plain = [
        Cell(name, "hdet", STARTS[start].setting(BEST[name]), task.steps, seed)
        for seed in range(given.first_seed, given.first_seed + given.seeds)
        for name, task in tasks.items()
        for start in given.starts
    ]
    errors = []
    if not given.report:
        errors += runner.run(plain, tasks, contenders, given.out, jobs=given.jobs, label="the recipe")
        wanted = [one for cell in plain for one in changed(cell, parts, given.out)]
        errors += runner.run(wanted, tasks, contenders, given.out, jobs=given.jobs, label="without a part")
    named = {(name, STARTS[start].setting(BEST[name])): start for name in tasks for start in given.starts}
    rows = [row for cell in plain for row in finished(cell, named, tasks[cell.task], parts, given.out)]
    show(rows, parts, given.tasks)
    told = [(*row[:5], int(row[5])) for row in rows]
    return runner.finish(errors, given.csv, ["task", "start", "without", "seed", "test_loss", "spoke"], told)


def changed(cell: Cell, parts: Sequence[str], folder: Path) -> Iterator[Cell]:
    """The runs without a part that had a say in the recipe's own."""
    result = cells.load(folder, cell)
    if result is not None:
        spoke = {re.sub(r"\[[^:]*\]: ", ": ", said) for said in result.details["spoke"]}  # of whichever rate
        for part in parts:
            if {SAID_BY.get(one, one) for one in part.split(AND)} & (spoke | ANY_RUN):
                yield Cell(cell.task, part, cell.setting, cell.steps, cell.seed)


def finished(
    cell: Cell, named: dict[tuple[str, Setting], str], task: Task, parts: Sequence[str], folder: Path
) -> Iterator[Row]:
    """The recipe's run and those without a part, with whether that had a say."""
    plain = cells.load(folder, cell)
    if plain is None:
        return
    start = named[cell.task, cell.setting]
    yield cell.task, start, "", cell.seed, judged(task, plain.test), True
    again = {one.contender: cells.load(folder, one) for one in changed(cell, parts, folder)}
    for part in parts:
        result = again.get(part, plain)
        if result is not None:
            yield cell.task, start, part, cell.seed, judged(task, result.test), part in again


def show(rows: Sequence[Row], parts: Sequence[str], tasks: Sequence[str]) -> None:
    """By part: runs it had a say in, what the recipe loses without it, with a standard error, and the same by task."""
    plain = {(task, start, seed): loss for task, start, part, seed, loss, _ in rows if not part}
    width = max(30, *(len(part) + 2 for part in parts))
    print("left out".ljust(width) + "had a say".rjust(10) + "all".rjust(20) + "".join(task.rjust(13) for task in tasks))
    for part in parts:
        lost: defaultdict[str, list[float]] = defaultdict(list)
        for task, start, left_out, seed, loss, _ in rows:
            if left_out == part:
                lost[task].append(loss - plain[task, start, seed])
        every = [value for values in lost.values() for value in values]
        if not every:
            continue
        said = sum(spoke for *_, left_out, _, _, spoke in rows if left_out == part)
        error = np.std(every, ddof=1) / np.sqrt(len(every)) if len(every) > 1 else np.nan
        line = part.ljust(width) + f"{said}/{len(every)}".rjust(10) + f"{np.mean(every):+.4f} +- {error:.4f}".rjust(20)
        print(line + "".join((f"{np.mean(lost[task]):+.4f}" if lost[task] else "-").rjust(13) for task in tasks))


if __name__ == "__main__":
    sys.exit(main())
