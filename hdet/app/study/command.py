"""The command `hdet ablate`. Needs the extras `cli` and `study`."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hdet import __version__
from hdet.app.ending import ended_early
from hdet.app.output import reading
from hdet.app.study import pictures, pool, runner, starts, statistics, tables
from hdet.app.study.cells import Cell, Timer, cells, shard
from hdet.app.study.declaration import Study, file_name, label
from hdet.app.study.folder import StudyFolder, tolerated
from hdet.app.study.statistics import Levels
from hdet.app.study.timing import Timings, seconds_per_step
from hdet.errors import ConfigError, HdetError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A disk, a quota, and a limit on a file's size."""


def ablate(
    study: Annotated[Path, typer.Argument(help="YAML file that declares the study.")],
    out: Annotated[Path | None, typer.Option(help="Study folder; by default runs/ and the study's name.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Cells to run at a time.")] = 1,
    part: Annotated[
        str | None, typer.Option("--shard", metavar="I/N", help="Run the i-th of n parts only, for job arrays.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the cells and their cost, by a short run of each kind; run none.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="The study's quick version.")] = False,
) -> None:
    """Run an ablation study: a grid of runs over seeds, tables and pictures. Goes on where it was left.

    Example: hdet ablate studies/table1.yaml --quick --jobs 2
    """
    declared = Study.load(study)
    shown = declared.quickened() if quick else declared
    folder = StudyFolder(out if out is not None else Path("runs") / shown.name)
    with reading(folder.path):
        (folder.path / "cells").exists()  # it tells of a folder that this user may not enter
    everything, timings = _planned(declared, folder, quick=quick, jobs=jobs, dry_run=dry_run, part=part)
    mine = everything if part is None else shard(everything, part)
    console = Console(highlight=False)
    if dry_run:
        _show_cost(console, folder, mine, jobs, timings)
        _print(console, *_spent(shown, everything))
        return
    runner.require_locks()
    began_by = folder.begin(shown)
    if began_by != __version__:
        _print(console, f"warning: {folder.path} was begun by hdet {began_by}, and this is {__version__}")
    try:
        starts.make_missing(declared, runner.pending(folder, mine), partial(_print, console))
        errors = _run(console, folder, mine, jobs, shown.metrics)
    except KeyboardInterrupt as error:
        raise typer.Exit(ended_early(error, "; the same command goes on")) from None
    try:
        problems = summarise(folder, shown, everything)
    except OSError as error:
        way_out = "make room" if error.errno in FULL else "mend that"
        raise HdetError(
            f"the tables in {folder.path} could not be written ({error}); {way_out}, and the same command writes them"
        ) from None
    for metric in shown.metrics:
        text = folder.path / f"table_{file_name(metric)}.txt"
        if text.exists():
            _print(console, text.read_text(encoding="utf-8"))
    left = len(runner.pending(folder, everything))
    _print(console, f"written to {folder.path}" + (f"; {left} cells are still to run" if left else ""))
    if problems:
        _print(console, *problems)
        raise HdetError(
            f"{len(problems)} results cannot be read (see above), such as: {problems[0]}; a cell whose folder is "
            f"removed is run again"
        )
    if errors:
        raise HdetError(f"{errors} cells failed (see above); run the study again to try them again")


def summarise(folder: StudyFolder, study: Study, everything: list[Cell]) -> list[str]:
    """Write `cells.csv`, the tables of every metric and the pictures, from the cells that are finished.

    Returns a line for each result or history that cannot be read; the others are shown all the same.
    """
    problems: list[str] = []
    folder.write_cells(everything, study.metrics, problems)
    baseline = {key: label(value) for key, value in study.baseline.items()}
    seconds = _mean_seconds(folder, everything, problems) if study.budget.hold == "seconds" else None
    for metric in study.metrics:
        groups = folder.groups(everything, metric, problems)
        if all(value is None for values in groups.values() for value in values.values()):
            continue
        rows = statistics.rows(groups, baseline, study.level, tested=not study.contrasts, seconds=seconds)
        contrasts = statistics.contrasts(groups, study.pairs, study.level)
        table = tables.Table(metric, rows, contrasts, study.level, _spent(study, everything))
        named = file_name(metric)
        folder.write(f"table_{named}.txt", tables.as_text(table))
        folder.write(f"table_{named}.csv", tables.as_csv(rows))
        if contrasts:
            folder.write(f"contrasts_{named}.csv", tables.as_csv(contrasts))
        folder.write(f"table_{named}.md", tables.as_markdown(table))
        folder.write(f"table_{named}.tex", tables.as_latex(table))
        for factor, levels in study.factors.items():
            if len(levels) > 1:
                name = file_name(factor.replace(".", "_"))
                pictures.draw_factor(rows, factor, folder.path / f"{named}_by_{name}.png", metric=metric)
    pictures.draw_curves(folder.curves(everything, problems), folder.path / "curves.png", title=study.name)
    return problems


def _planned(
    declared: Study, folder: StudyFolder, *, quick: bool, jobs: int, dry_run: bool, part: str | None
) -> tuple[list[Cell], Timings]:
    """The cells, and what times a step of each under the settings it will be run with."""
    measure = partial(seconds_per_step, threads=None if jobs == 1 else pool.THREADS)
    path = folder.path / "timings.json"
    holds_seconds = (declared.quickened() if quick else declared).budget.hold == "seconds"
    if holds_seconds and part is not None:
        timings = Timings(path, None)
    elif holds_seconds or not dry_run:
        timings = Timings(path, measure)
    else:
        timings = Timings(None, measure)  # a dry run that plans nothing by its timings leaves no trace
    return cells(declared, quick=quick, timer=timings), timings


def _spent(study: Study, everything: Sequence[Cell]) -> list[str]:
    """How equal the budget was held, where that wants to be said."""
    if study.budget.hold == "seconds":
        return ["Held equal: wall time, by steps timed before; the seconds are those the runs then took."]
    if study.budget.hold != "samples":
        return []
    spent = [cell.samples for cell in everything if cell.samples is not None]
    remark = (
        "Held equal: examples trained on. Those that only probes and counterfactual evidence evaluate are not counted; "
        "the seconds in cells.csv have them."
    )
    total = study.budget.total
    if total is not None and min(spent) < total:
        remark += f" Steps are whole: of {total:g} the cells spend {min(spent)} to {max(spent)}."
    return [remark]


def _mean_seconds(folder: StudyFolder, everything: Sequence[Cell], problems: list[str]) -> dict[Levels, float]:
    found: dict[Levels, list[float]] = {}
    for cell in everything:
        seconds = tolerated(partial(folder.seconds, cell), problems)
        if seconds is not None:
            found.setdefault(tuple(cell.levels.items()), []).append(seconds)
    return {levels: mean(values) for levels, values in found.items()}


def _run(console: Console, folder: StudyFolder, mine: list[Cell], jobs: int, metrics: Sequence[str]) -> int:
    todo = runner.pending(folder, mine)
    done = len({cell.key for cell in mine}) - len(todo)
    if done:
        console.print(f"{done} cells are finished already")
    errors, began = 0, time.perf_counter()
    columns = (TextColumn("cells"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("cells", total=len(todo))
        for number, (cell, error) in enumerate(runner.run(folder, mine, jobs=jobs), start=1):
            progress.advance(bar)
            errors += error is not None and error != runner.ELSEWHERE
            elapsed = time.perf_counter() - began
            said = _outcome(folder, cell, error, metrics)
            _print(console, f"[{number}/{len(todo)}, {elapsed:.0f} s] {cell}: {said}")
    return errors


def _outcome(folder: StudyFolder, cell: Cell, error: str | None, metrics: Sequence[str]) -> str:
    if error is not None:
        return error if error == runner.ELSEWHERE else f"failed: {error}"
    problems: list[str] = []
    values = {name: tolerated(partial(folder.metric, cell, name), problems) for name in metrics}
    said = [
        f"{name} {value:.4f}" if math.isfinite(value) else f"{name} diverged"
        for name, value in values.items()
        if value is not None
    ]
    return "  ".join([*said, *problems])


def _show_cost(console: Console, folder: StudyFolder, mine: list[Cell], jobs: int, timer: Timer) -> None:
    """Every cell with its steps, samples and estimated seconds, and the sum of those still to run."""
    if not mine:
        raise ConfigError("there is nothing to run: this shard is empty")
    total: float | None = 0.0
    todo = {cell.key for cell in runner.pending(folder, mine)}
    of_scripts = [folder.seconds(cell) for cell in mine if cell.config is None and cell.key not in todo]
    of_a_script = median([seconds for seconds in of_scripts if seconds is not None]) if of_scripts else None
    seen: set[str] = set()
    for cell in mine:
        seconds = timer(cell.config) * cell.config.steps if cell.config is not None else of_a_script
        if cell.key in todo and cell.key not in seen:
            total = None if total is None or seconds is None else total + seconds
        cost = "" if cell.config is None else f"  {cell.config.steps} steps  {cell.samples} samples  {seconds:.0f} s"
        state = "" if cell.key in todo else "  (finished)"
        same = "  (the same run as one above)" if cell.key in seen else ""
        seen.add(cell.key)
        _print(console, f"{cell}{cost}{state}{same}")
    about = (
        "for how long is unknown until one is finished" if total is None else f"about {total / jobs / 60:.1f} minutes"
    )
    _print(console, f"{len(mine)} cells, {len(seen)} different runs, {len(todo)} to run: {about} with --jobs {jobs}")
    first = starts.missing([cell for cell in mine if cell.key in todo])
    if first:
        _print(console, f"{len(first)} checkpoints that they set out from are made first, such as {next(iter(first))}")


def _print(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
