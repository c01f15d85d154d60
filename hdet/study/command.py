"""The command `hdet ablate`. Needs the extras `cli` and `study`."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from hdet.errors import ConfigError, HdetError
from hdet.study import pictures, runner, statistics, tables
from hdet.study.cells import Cell, Timer, cells, shard
from hdet.study.declaration import Study, label
from hdet.study.folder import StudyFolder, Timings


def ablate(
    study: Annotated[Path, typer.Argument(help="YAML file that declares the study.")],
    out: Annotated[Path | None, typer.Option(help="Study folder; by default runs/ and the study's name.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Cells to run at a time.")] = 1,
    part: Annotated[
        str | None,
        typer.Option("--shard", metavar="I/N", help="Run the i-th of n parts only, for job arrays."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the cells and their cost; run nothing.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="The study's quick version.")] = False,
) -> None:
    """Run an ablation study: a grid of runs over seeds, tables and pictures. Goes on where it was left."""
    declared = Study.load(study)
    shown = declared.quickened() if quick else declared
    folder = StudyFolder(out if out is not None else Path("runs") / shown.name)
    # A dry run leaves no trace.
    timings = Timings(None if dry_run else folder.path / "timings.json", runner.seconds_per_step)
    everything = cells(declared, quick=quick, timer=timings)
    mine = everything if part is None else shard(everything, part)
    console = Console(highlight=False)
    if dry_run:
        _show_cost(console, folder, mine, jobs, timings)
        return
    folder.begin(shown)
    errors = _run(console, folder, mine, jobs, shown.metrics)
    summarise(folder, shown, everything)
    for metric in shown.metrics:
        text = folder.path / f"table_{metric}.txt"
        if text.exists():
            console.print(text.read_text(encoding="utf-8"), markup=False, soft_wrap=True)
    left = len(runner.pending(folder, everything))
    console.print(
        f"written to {folder.path}" + (f"; {left} cells are still to run" if left else ""),
        markup=False,
        soft_wrap=True,
    )
    if errors:
        raise HdetError(f"{errors} cells failed (see above); run the study again to try them again")


def summarise(folder: StudyFolder, study: Study, everything: list[Cell]) -> None:
    """Write `cells.csv`, the tables of every metric and the pictures, from the cells that are finished."""
    folder.write_cells(everything, study.metrics)
    for metric in study.metrics:
        groups = folder.groups(everything, metric)
        if not groups:
            continue
        rows = statistics.rows(groups, {key: label(value) for key, value in study.baseline.items()}, study.level)
        folder.write(f"table_{metric}.txt", tables.as_text(rows, metric))
        folder.write(f"table_{metric}.csv", tables.as_csv(rows))
        folder.write(f"table_{metric}.md", tables.as_markdown(rows, metric))
        folder.write(f"table_{metric}.tex", tables.as_latex(rows, metric))
        for factor, levels in study.factors.items():
            if len(levels) > 1:
                name = factor.replace(".", "_")
                pictures.draw_factor(rows, factor, folder.path / f"{metric}_by_{name}.png", metric=metric)
    pictures.draw_curves(folder.curves(everything), folder.path / "curves.png", title=study.name)


def _run(console: Console, folder: StudyFolder, mine: list[Cell], jobs: int, metrics: Sequence[str]) -> int:
    todo = runner.pending(folder, mine)
    done = len({cell.key for cell in mine}) - len(todo)
    if done:
        console.print(f"{done} cells are finished already")
    errors, began = 0, time.perf_counter()
    columns = (
        TextColumn("cells"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("cells", total=len(todo))
        for number, (cell, error) in enumerate(runner.run(folder, mine, jobs=jobs), start=1):
            progress.advance(bar)
            errors += error is not None
            said = f"failed: {error}" if error is not None else _outcome(folder, cell, metrics)
            elapsed = time.perf_counter() - began
            console.print(f"[{number}/{len(todo)}, {elapsed:.0f} s] {cell}: {said}", markup=False, soft_wrap=True)
    return errors


def _outcome(folder: StudyFolder, cell: Cell, metrics: Sequence[str]) -> str:
    values = {name: folder.metric(cell, name) for name in metrics}
    return "  ".join(
        f"{name} {value:.4f}" if value is not None and math.isfinite(value) else f"{name} diverged"
        for name, value in values.items()
    )


def _show_cost(console: Console, folder: StudyFolder, mine: list[Cell], jobs: int, timer: Timer) -> None:
    """Every cell with its steps, samples and estimated seconds, and the sum of those still to run."""
    if not mine:
        raise ConfigError("there is nothing to run: this shard is empty")
    total = 0.0
    todo = {cell.key for cell in runner.pending(folder, mine)}
    seen: set[str] = set()
    for cell in mine:
        if cell.config is None:
            cost = ""
        else:
            seconds = timer(cell.config) * cell.config.steps
            cost = f"  {cell.config.steps} steps  {cell.samples} samples  {seconds:.0f} s"
            if cell.key in todo and cell.key not in seen:
                total += seconds
        state = "" if cell.key in todo else "  (finished)"
        same = "  (the same run as one above)" if cell.key in seen else ""
        seen.add(cell.key)
        console.print(f"{cell}{cost}{state}{same}", markup=False, soft_wrap=True)
    console.print(
        f"{len(mine)} cells, {len(seen)} different runs, {len(todo)} to run: about "
        f"{total / jobs / 60:.1f} minutes with --jobs {jobs}",
        markup=False,
        soft_wrap=True,
    )
