"""Runs the cells that have no file yet, in processes; a benchmark of cells has its options and its end here, too."""

from __future__ import annotations

import argparse
import csv
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hdet.app.study.pool import several
from search_parts import cell as cells
from search_parts.cell import Cell, Result
from search_parts.contender import Contender
from search_parts.task import Task

Attempt = tuple[Cell, Result | None, str]


def add_options(parser: argparse.ArgumentParser, out: Path) -> None:
    """The options of a benchmark that runs cells and tells of them.

    Args:
        out: where the runs' files lie by default.
    """
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, default=out, help="folder of the runs' files")
    parser.add_argument("--csv", type=Path, help="where to write every run's test loss")
    parser.add_argument("--report", action="store_true", help="run nothing")


def add_recipes(parser: argparse.ArgumentParser) -> None:
    """The option by which a benchmark of the recipe, `recipes`, runs the one with a rate for each matrix as well."""
    both = ["hdet", "hdet_matrices"]
    told = "also the recipe with a rate for each matrix"
    parser.add_argument("--matrices", dest="recipes", action="store_const", const=both, default=both[:1], help=told)


def finish(errors: Sequence[str], path: Path | None, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> int:
    """Write a row a run, if somewhere, and say which cells broke; returns the exit code."""
    if path is not None:
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows([f"{value:.6g}" if isinstance(value, float) else value for value in row] for row in rows)
    for error in errors:
        print(f"broke: {error}", file=sys.stderr)
    return 1 if errors else 0


def run(
    todo: Sequence[Cell],
    tasks: Mapping[str, Task],
    contenders: Mapping[str, Contender],
    folder: Path,
    *,
    jobs: int,
    label: str,
) -> list[str]:
    """Run what is not done, each cell once. Returns the errors of cells that broke, which have no file."""
    missing = [cell for cell in dict.fromkeys(todo) if not (folder / cell.path).exists()]
    progress = Progress(label, len(set(todo)), len(missing))
    errors = []
    for cell, result, error in _attempts(missing, tasks, contenders, folder, jobs):
        if error:
            errors.append(f"{cell}\n{error}")
        progress.report(cell, result)
    return errors


class Progress:
    """One line a cell: how many are done, what came out, and how long the rest takes at the pace so far."""

    def __init__(self, label: str, total: int, missing: int) -> None:
        self.total, self.missing, self.finished = total, missing, 0
        self.began = time.perf_counter()
        if total:
            print(f"{label}: {total} cells, {total - missing} done already", flush=True)

    def report(self, cell: Cell, result: Result | None) -> None:
        """A cell has ended."""
        self.finished += 1
        said = "broke" if result is None else f"{result.test:.4f}, {result.seconds:.0f} s"
        waiting = self.missing - self.finished
        left = (time.perf_counter() - self.began) / self.finished * waiting
        print(f"[{self.total - waiting}/{self.total}] {cell}: {said}; {left / 60:.0f} min left", flush=True)


def attempt(task: Task, contender: Contender, cell: Cell, folder: Path) -> Attempt:
    """Run one cell and write its file; an error that is no divergence is told, not raised."""
    try:
        result = cells.run(task, contender, cell)
        cells.save(folder, cell, result)
    except Exception:  # one broken cell must not end the others
        return cell, None, traceback.format_exc()
    return cell, result, ""


def _attempts(
    missing: Sequence[Cell], tasks: Mapping[str, Task], contenders: Mapping[str, Contender], folder: Path, jobs: int
) -> Iterator[Attempt]:
    work = [(tasks[cell.task], contenders[cell.contender], cell, folder) for cell in missing]
    try:
        for place, result in several(attempt, work, jobs=jobs):
            yield (missing[place], None, repr(result)) if isinstance(result, Exception) else result
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        raise
