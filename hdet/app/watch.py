"""`hdet watch`: a run in progress, seen from another terminal."""

from __future__ import annotations

import html
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hdet.app.output import reading
from hdet.app.report import reported_run
from hdet.app.run.folder import RunFolder
from hdet.app.serving import PageServer
from hdet.app.table import whole_table
from hdet.app.text import one_line
from hdet.digits import four_digits, loss_digits
from hdet.errors import ConfigError
from hdet.record import WindowRecord
from hdet.report import ReportedRun, page, verdicts
from hdet.report.together import headings
from hdet.report.verdict import Verdict

LATEST_FAULTS = 3
DAY = 86_400.0


def watch(
    run: Annotated[Path, typer.Argument(help="Run folder, or the history file of a loop of your own.")],
    every: Annotated[float, typer.Option(min=0.1, max=DAY, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once; so it is, too, where there is no terminal.")] = False,
    serve: Annotated[bool, typer.Option("--serve", help="Serve the report's page, refreshing itself.")] = False,
    host: Annotated[
        str | None,
        typer.Option(help="With --serve: the address, by default 127.0.0.1; any but this machine's own needs a token."),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="With --serve: the port; by default, and as 0, a free one.")
    ] = None,
) -> None:
    """Show a run while it trains: progress, loss, what its knobs have learned, faults. It may run elsewhere.

    Ends with the run, under --compare with the one without hdet; Ctrl-C ends the view alone.

    With --serve, browsers see the page of hdet report instead, until Ctrl-C.

    Example: hdet watch runs/quickstart --serve
    """
    with reading(run):
        there = run.exists()
    if not there:
        raise ConfigError(f"there is nothing at {run}; give the folder of a run (--out of hdet run), or a history file")
    if serve and once:
        raise ConfigError("--serve goes on until Ctrl-C, and --once looks once; say one of them")
    if serve:
        _serve(run, host if host is not None else "127.0.0.1", port or 0, every)
        return
    if host is not None or port is not None:
        raise ConfigError("--host and --port say where --serve is heard; say --serve too, or leave them out")
    console = Console(highlight=False)
    seen = _look(run)
    if once or not console.is_terminal:
        console.print(shown(seen))
        return
    view = fitted(seen, console)
    with Live(view, console=console, auto_refresh=False, screen=False) as live, _left_by_ctrl_c():
        while not seen.over:
            time.sleep(every)
            seen = _look(run)
            live.update(fitted(seen, console), refresh=True)


@contextmanager
def _left_by_ctrl_c() -> Iterator[None]:
    """Ctrl-C ends the block, and is no fault. What ends a command otherwise goes on."""
    try:
        yield
    except KeyboardInterrupt as error:
        if type(error) is not KeyboardInterrupt:
            raise


def _serve(run: Path, host: str, port: int, every: float) -> None:
    with PageServer(_Drawn(run), host=host, port=port, every=every) as server:
        print(f"{server.url} shows the run; Ctrl-C ends it", flush=True)
        if not server.local:
            print("others see it who have this address; over plain HTTP it can be read on the way", flush=True)
        with _left_by_ctrl_c():
            server.serve_forever()


class _Drawn:
    """A run's page, drawn anew when its files have changed."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._of: tuple[int, ...] = ()
        self._page = ("", True)
        self._result: dict[str, Any] = {}

    def __call__(self) -> tuple[str, bool]:
        """The page, and whether it may still change."""
        files = (self.run / "history.jsonl", self.run / "result.json") if self.run.is_dir() else (self.run,)
        state = tuple(file.stat().st_mtime_ns if file.is_file() else 0 for file in files)
        if state != self._of or RunFolder(self.run).abandoned(self._result) or not self._page[0]:
            seen = _look(self.run)
            if not seen.windows:
                name = html.escape(one_line(seen.name))
                return f"<!DOCTYPE html><title>{name}</title><p>{name}: no window has closed yet", True
            self._page, self._result = (page(seen), not seen.over), seen.result
            self._of = state
        return self._page


def _look(run: Path) -> ReportedRun:
    with reading(run):
        history = run / "history.jsonl" if run.is_dir() else run
        return reported_run(run) if history.is_file() else ReportedRun(run.resolve().name, [])


def shown(run: ReportedRun) -> Group:
    """One view of a run: what it did, then a row for each knob."""
    return next(_views(run, most=1))


def fitted(run: ReportedRun, console: Console) -> Group:
    """A view that a terminal shows whole: where its rows are too many, knobs of one judgement share a row."""
    for view in _views(run, console.height):
        if _height(view, console) <= console.height:
            break
    return view


def _views(run: ReportedRun, most: int) -> Iterator[Group]:
    """The whole view first, then lower ones, of at most so many rows."""
    course, found = _course(run), verdicts(run.windows) if run.windows else []
    if not found:
        yield Group(*course)
        return
    yield Group(*course, _knobs([(one.knob, [one]) for one in found], run))
    together = headings([run.windows])
    kinds = Counter(heading.kind for heading in together)
    together.sort(key=lambda heading: kinds[heading.kind])  # of many of one kind the last are left out
    by_name = {verdict.knob: verdict for verdict in found}
    rows = [(heading.name, [by_name[knob] for knob in heading.knobs]) for heading in together]
    for count in range(min(len(rows), most), 0, -1):
        more = sum(len(alike) for _, alike in rows[count:])
        told = [Text(f"and {more} more; hdet watch --once shows all")] if more else []
        yield Group(*course, _knobs(rows[:count], run), *told)


def _height(view: Group, console: Console) -> int:
    return len(console.render_lines(view, pad=False))


def _course(run: ReportedRun) -> list[Text | Padding]:
    """What a run did, and how it ended."""
    if not run.windows:
        return [Text(f"{one_line(run.name)}: no window has closed yet")]
    last = run.windows[-1]
    steps = run.declared.get("steps")
    parts: list[Text | Padding] = [Text(_headline(run.name, last, steps))]
    if isinstance(steps, int):
        parts.append(Padding(ProgressBar(total=steps, completed=last.stop, width=60)))  # a bar alone ends no line
    parts.append(_losses(run))
    faults = [(record, fault) for record in run.windows for fault in record.faults]
    if faults:
        parts.append(Text(f"{len(faults)} fault{'s' * (len(faults) > 1)}, the latest:"))
    for record, fault in faults[-LATEST_FAULTS:]:
        told = "  ".join(f"{name} {value}" for name, value in fault.items())
        parts.append(Text(one_line(f"  window {record.window + 1}: {told}")))
    if run.held_out_loss is not None:
        parts.append(Text(_ending(run, loss_digits(run.held_out_loss))))
    return parts


def _ending(run: ReportedRun, loss: str) -> str:
    if run.comparing:
        return f"trained: held-out loss {loss}; the same run without hdet is trained now"
    plain = "" if run.plain_loss is None else f"; {loss_digits(run.plain_loss)} without hdet"
    return f"over: held-out loss {loss}{plain}"


def _headline(name: str, last: WindowRecord, steps: object) -> str:
    of = f" of {steps}" if isinstance(steps, int) else ""
    pace = last.seconds / (last.stop - last.start)
    left = f", about {pace * (steps - last.stop):.0f} s left" if isinstance(steps, int) and last.stop < steps else ""
    return f"{one_line(name)}: step {last.stop}{of}, window {last.window + 1}, {1000 * pace:.0f} ms a step{left}"


def _losses(run: ReportedRun) -> Text:
    first, last = run.windows[0], run.windows[-1]
    lowest = min(run.windows, key=lambda record: record.loss if record.loss == record.loss else float("inf"))
    return Text(
        f"training loss {loss_digits(last.loss)}; {loss_digits(first.loss)} in the first window, "
        f"lowest {loss_digits(lowest.loss)} in window {lowest.window + 1}"
    )


def _knobs(rows: Sequence[tuple[str, Sequence[Verdict]]], run: ReportedRun) -> Table:
    """A row for each name; of several knobs the smallest and the largest value, and how many are trusted how far."""
    table = whole_table("knob", "set to", "learned", "now", "trust")
    bases = run.windows[-1].bases
    for name, found in rows:
        values = ([one.start for one in found], [one.end for one in found], [bases.get(one.knob) for one in found])
        numbers = map(_range, values)
        table.add_row(*(Text(cell) for cell in (one_line(name), *numbers, _trust(found))))
    return table


def _range(values: Sequence[float | None]) -> str:
    told = [value for value in values if value is not None]
    if not told:
        return "-"
    low, high = four_digits(min(told)), four_digits(max(told))
    return low if low == high else f"{low} to {high}"


def _trust(found: Sequence[Verdict]) -> str:
    counts = Counter(one.trust for one in found)
    return ", ".join(trust if len(counts) == 1 else f"{count} {trust}" for trust, count in counts.most_common())
