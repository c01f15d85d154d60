"""`hdet watch`: a run in progress, seen from another terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hdet.app.report import reported_run
from hdet.app.text import one_line
from hdet.errors import ConfigError
from hdet.record import WindowRecord
from hdet.report import ReportedRun, verdicts

LATEST_FAULTS = 3


def watch(
    run: Annotated[Path, typer.Argument(help="Run folder, or the history file of a loop of your own.")],
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once; so it is, too, where there is no terminal.")] = False,
) -> None:
    """Show a run while it trains: progress, loss, what its knobs have learned, faults. It may run elsewhere.

    Ends with the run; Ctrl-C ends the view alone.

    Example: hdet watch runs/quickstart
    """
    if not run.exists():
        raise ConfigError(f"there is nothing at {run}; give the folder of a run (--out of hdet run), or a history file")
    console = Console(highlight=False)
    seen = _look(run)
    if once or not console.is_terminal:
        console.print(shown(seen))
        return
    with Live(shown(seen), console=console, auto_refresh=False, screen=False) as live:
        try:
            while not seen.result:
                time.sleep(every)
                seen = _look(run)
                live.update(shown(seen), refresh=True)
        except KeyboardInterrupt:
            return


def _look(run: Path) -> ReportedRun:
    history = run / "history.jsonl" if run.is_dir() else run
    return reported_run(run) if history.is_file() else ReportedRun(run.resolve().name, [])


def shown(run: ReportedRun) -> Group:
    """One view of a run."""
    if not run.windows:
        return Group(Text(f"{one_line(run.name)}: no window has closed yet"))
    last = run.windows[-1]
    steps = run.declared.get("steps")
    parts: list[Text | ProgressBar | Table] = [Text(_headline(run.name, last, steps))]
    if isinstance(steps, int):
        parts.append(ProgressBar(total=steps, completed=last.stop, width=60))
    parts += [_losses(run), _knobs(run)]
    faults = [(record, fault) for record in run.windows for fault in record.faults]
    if faults:
        parts.append(Text(f"{len(faults)} faults, the latest:"))
    for record, fault in faults[-LATEST_FAULTS:]:
        told = "  ".join(f"{name} {value}" for name, value in fault.items())
        parts.append(Text(one_line(f"  window {record.window}: {told}")))
    if run.held_out_loss is not None:
        parts.append(Text(f"over: held-out loss {run.held_out_loss:.4f}"))
    return Group(*parts)


def _headline(name: str, last: WindowRecord, steps: object) -> str:
    of = f" of {steps}" if isinstance(steps, int) else ""
    pace = last.seconds / (last.stop - last.start)
    left = f", about {pace * (steps - last.stop):.0f} s left" if isinstance(steps, int) and last.stop < steps else ""
    return f"{one_line(name)}: step {last.stop}{of}, window {last.window + 1}, {1000 * pace:.0f} ms a step{left}"


def _losses(run: ReportedRun) -> Text:
    first, last = run.windows[0], run.windows[-1]
    lowest = min(run.windows, key=lambda record: record.loss if record.loss == record.loss else float("inf"))
    return Text(
        f"training loss {last.loss:.4f}; {first.loss:.4f} in the first window, lowest {lowest.loss:.4f} in window "
        f"{lowest.window + 1}"
    )


def _knobs(run: ReportedRun) -> Table:
    table = Table("knob", "set to", "learned", "now", "trust")
    for verdict in verdicts(run.windows):
        now = run.windows[-1].bases.get(verdict.knob)
        numbers = ("-" if value is None else f"{value:.4g}" for value in (verdict.start, verdict.end, now))
        table.add_row(*(Text(cell) for cell in (one_line(verdict.knob), *numbers, verdict.trust)))
    return table
