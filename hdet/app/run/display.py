"""A run on the screen: a live bar in a terminal, plain lines elsewhere, and a table at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text
from torch import Tensor

from hdet.app.run.folder import RunFolder
from hdet.app.run.loop import Watcher
from hdet.app.run.runner import Result
from hdet.app.table import whole_table
from hdet.digits import four_digits, loss_digits
from hdet.history import WindowRecord
from hdet.report import Verdict
from hdet.report.verdict import NO_PROGRESS

REFRESH_SECONDS = 0.5
PLAIN_LINES = 20
TITLES = {"hdet": "training", "plain": "the same without hdet"}


class Display(Watcher):
    """Shows loss, bases, window and time left.

    The loss is read from the device twice a second at most, so that showing it does not slow the run down.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None
        self._bases = ""

    def begin(self, phase: str, first: int, steps: int) -> None:
        self._title, self._first, self._steps = TITLES[phase], first, steps
        self._bases = ""
        self._began = self._shown = time.perf_counter()
        self._lines = 0
        if first:
            self.console.print(f"going on from step {first}")
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[loss]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._progress.add_task(self._title, total=steps, completed=first, loss="")
            self._live = Live(self._rendered(), console=self.console, refresh_per_second=4)
            self._live.start()

    def step(self, done: int, losses: Sequence[Tensor]) -> None:
        if self._live is not None:
            now = time.perf_counter()
            if now - self._shown >= REFRESH_SECONDS or done == self._steps:
                self._shown = now
                loss = f"loss {_mean(losses):.4f}"
                self._progress.update(self._task, completed=done, loss=loss)
                self._live.update(self._rendered())
        elif done * PLAIN_LINES // self._steps > self._lines:
            self._lines = done * PLAIN_LINES // self._steps
            elapsed = time.perf_counter() - self._began
            left = elapsed / max(1, done - self._first) * (self._steps - done)
            parts = [f"{self._title}: step {done}/{self._steps}", f"loss {_mean(losses):.4f}", self._bases]
            self.console.print(
                "  ".join(part for part in (*parts, f"{left:.0f} s left") if part), soft_wrap=True, markup=False
            )

    def window(self, record: WindowRecord, bases: dict[str, float]) -> None:
        self._bases = f"window {record.window + 1}  {listed(bases)}"
        for fault in record.faults:
            self.console.print(f"window {record.window + 1}: {listed(fault)}", soft_wrap=True, markup=False)
        if self._live is not None:
            self._live.update(self._rendered())

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _rendered(self) -> Group:
        return Group(self._progress, Text(self._bases))


def listed(items: Mapping[str, object]) -> str:
    """Names and values on one line.

    >>> listed({"learning_rate": 0.00123456, "dropout": 0.1})
    'learning_rate 0.001235  dropout 0.1'
    """
    return "  ".join(
        f"{name} {four_digits(value)}" if isinstance(value, float) else f"{name} {value}"
        for name, value in items.items()
    )


def show_result(console: Console, result: Result, folder: RunFolder) -> None:
    """The closing tables: the knobs, the held-out losses, and where everything lies."""
    if result.knobs:
        table = whole_table("knob", "set to", "learned", "trust", title="knobs, their schedules aside")
        for knob in result.knobs:
            table.add_row(*(Text(cell) for cell in (knob.knob, *_learned(knob), knob.trust)))
        console.print(table)
        if not all(knob.progress for knob in result.knobs):
            console.print(f"{NO_PROGRESS}; set none of these values for what it did", soft_wrap=True, markup=False)
        for knob in result.knobs:
            console.print(f"{knob.knob} moved: {knob.moved}", soft_wrap=True, markup=False)
            console.print(f"{knob.knob} at the end: {knob.outlook}", soft_wrap=True, markup=False)
    table = whole_table("", "held-out loss", "seconds", title="held-out loss")
    table.add_row("with hdet", loss_digits(result.test_loss), f"{result.seconds:.0f}")
    if result.plain is not None:
        table.add_row("without", loss_digits(result.plain["test_loss"]), f"{result.plain['seconds']:.0f}")
    console.print(table)
    if result.ended:
        console.print(f"it {result.ended}", soft_wrap=True, markup=False)
    if result.faults:
        console.print(f"{result.faults} faults on the way; see {folder.history}", soft_wrap=True, markup=False)
    console.print(f"written to {folder.path}", soft_wrap=True, markup=False)


def _learned(knob: Verdict) -> tuple[str, str]:
    """The value that was set, and the one that was learned with their ratio."""
    if knob.start is None or knob.end is None:
        return "not recorded", "not recorded"
    factor = "" if knob.factor is None else f" (x {knob.factor:.3g})"
    return four_digits(knob.start), four_digits(knob.end) + factor


def _mean(losses: Sequence[Tensor]) -> float:
    return sum(float(loss) for loss in losses) / len(losses)
