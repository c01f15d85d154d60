"""Does a learning rate for each matrix pay in large models that are no GPTs? Small tasks, a million weights wide.

    python benchmarks/wide.py
    python benchmarks/wide.py --tasks tabular --seeds 3 --jobs 2
    python benchmarks/wide.py --report --csv wide.csv             # of the runs there are

Fixed cosines at .1, .3, 1, 3 and 10 times the rate that is best for the small model are swept; the oracle is the best
of them, by its mean over seeds. The recipe, with one rate and with one for each matrix, begins at .1, 1 and 10 times
that same rate, for the same compute. Regret is the test loss above the oracle's of the same seed.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from dataclasses import replace
from typing import Any

from lengths import ROOT, against_the_oracle, finish, finished, planned, show
from search_parts import cell as cells
from search_parts import runner
from search_parts.found import all_contenders, all_tasks

WIDE: dict[str, dict[str, Any]] = {
    "tabular": {"width": 720},
    "teacher": {"width": 1000},
    "digits_conv": {"channels": 240},
    "operator": {"width": 690},
    "text_recurrent": {"width": 384},
    "point_sets": {"width": 256},
}
"""By task, what gives its model about a million weights: three layers by AdamW; two, and convolutions, by SGD; two
networks, a GRU and attention over sets, by AdamW."""

RECIPES = ("hdet", "hdet_matrices")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=WIDE, default=list(WIDE))
    parser.add_argument("--seeds", type=int, default=1)
    runner.add_options(parser, ROOT / "runs" / "wide")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", "the probe is too small")
    known = all_tasks()
    tasks = {name: replace(known[name], **WIDE[name]) for name in given.tasks}
    plans = [(name, cell, start) for name in tasks for cell, start in planned(tasks[name], given.seeds, RECIPES)]
    errors: list[str] = []
    if not given.report:
        wanted = [cell for _, cell, _ in plans]
        errors = runner.run(wanted, tasks, all_contenders(), given.out, jobs=given.jobs, label="wide")
    ended = [(name, cell, start, cells.load(given.out, cell)) for name, cell, start in plans]
    runs = [finished(tasks[name], 1, cell, start, result) for name, cell, start, result in ended if result is not None]
    show(runs, against_the_oracle(runs))
    return finish(errors, given.csv, runs)


if __name__ == "__main__":
    sys.exit(main())
