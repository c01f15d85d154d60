"""`hdet report`: the page and the figures of runs that lie in folders or histories."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hdet.app.output import reading, writing
from hdet.app.run.folder import RunFolder
from hdet.document import read
from hdet.errors import ConfigError
from hdet.files import replace
from hdet.history import History
from hdet.report import ReportedRun, page, save_figures
from hdet.report.reported import reported

PAGE = "report.html"


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or history files of your own loops.")],
    out: Annotated[
        Path | None, typer.Option(help="The page's file; by default report.html, in the folder of a single run.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write figures there instead, as PDF, SVG and PNG.")
    ] = None,
    title: Annotated[str, typer.Option(help="Of the page, or of the figures.")] = "",
) -> None:
    """Show what runs did, on one page that opens from disk, or as figures for a paper.

    Example: hdet report runs/quickstart
    """
    if out is not None and figures is not None:
        raise ConfigError(
            "--figures writes figures in place of the page, and --out is the page's file; say one of them"
        )
    given = reported(reported_run(path) for path in runs)  # by names that differ
    if figures is not None:
        for run in given:
            folder = figures if len(given) == 1 else figures / run.name
            with writing(folder, "--figures"):
                written = save_figures(run.windows, folder, title=title or run.name)
            print(f"{len(written)} figures written to {folder}")
        return
    beside = runs[0] if runs[0].is_dir() else runs[0].parent
    target = out if out is not None else (beside if len(given) == 1 else Path()) / PAGE
    text = page(given, title=title)
    with writing(target, "--out"):
        replace(target, text.encode("utf-8"))
    print(f"{target} written; open it in a browser")


def reported_run(path: Path) -> ReportedRun:
    """A run from its folder, or from its history alone.

    Raises:
        ConfigError: there is no history, it may not be read, or the declaration beside it is no mapping.
        HdetError: what lies there cannot be read.
    """
    with reading(path):
        return _reported_run(path)


def _reported_run(path: Path) -> ReportedRun:
    folder = RunFolder(path)
    source = folder.history if path.is_dir() else path
    if not source.is_file():
        raise ConfigError(f"{path} holds no run: give a run folder, in which a history.jsonl lies, or such a file")
    windows = History(source).windows
    if not path.is_dir():
        return ReportedRun(path.stem if path.stem != "history" else path.resolve().parent.name, windows)
    there = folder.config.is_file() and folder.config.stat().st_size > 0
    declared = read(folder.config) if there else {}  # first: it tells of a text that cannot be read
    configuration = folder.config.read_text(encoding="utf-8") if there else ""
    result = folder.load_result() or {}
    if folder.abandoned(result):  # unless it has ended since
        result = {**(folder.load_result() or {}), "comparing": False}
    return ReportedRun(path.resolve().name, windows, configuration, declared, result)
