"""A short pilot: the first windows of a declared run, trained for what they cost and for how noisy its evidence is."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from hdet.app.run.config import RunConfig
from hdet.app.run.loop import Watcher
from hdet.app.run.runner import Run
from hdet.record import WindowRecord


@dataclass(frozen=True)
class Pilot:
    """What the first windows of a run showed. Times are medians; the first window warms up, and counts only if alone.

    Attributes:
        windows: their records.
        step_seconds: wall time of a step without windows' ends.
        closing_seconds: wall time of a window's end: probes, comparisons, the merge, the checkpoint.
        peak_bytes: the most memory in use: of the device, or of this process where the device is the CPU;
            None where the system does not tell.
        on: what these bytes lie on.
    """

    windows: list[WindowRecord]
    step_seconds: float
    closing_seconds: float
    peak_bytes: int | None
    on: str

    def seconds(self, steps: int, windows: int) -> tuple[float, float]:
        """What a run of that many steps and windows takes, and the part of it spent at windows' ends."""
        closing = windows * self.closing_seconds
        return steps * self.step_seconds + closing, closing


def pilot(config: RunConfig, windows: int) -> Pilot:
    """Train the first windows of a run in a folder that is thrown away."""
    device = torch.device(config.device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seen = _FirstWindows(windows)
    with tempfile.TemporaryDirectory(prefix="hdet-plan-") as folder, contextlib.suppress(_EnoughError):
        Run(config, Path(folder) / "pilot")(watcher=seen)
    peak: int | None
    if device.type == "cuda":
        peak, on = torch.cuda.max_memory_allocated(device), str(device)
    else:
        peak, on = _most_of_this_process(), "this process"
    step, end = (median(seconds[1:] or seconds) for seconds in (seen.steps, seen.ends))
    return Pilot(seen.records, step, end, peak, on)


def _most_of_this_process() -> int | None:
    try:
        import resource
    except ModuleNotFoundError:  # no POSIX system
        return None
    return (1 if sys.platform == "darwin" else 1024) * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class _EnoughError(Exception):
    """The pilot's last window has closed."""


class _FirstWindows(Watcher):
    """Times windows, what their steps take and what their ends do, and ends the run after some of them."""

    def __init__(self, windows: int) -> None:
        self.windows = windows
        self.records: list[WindowRecord] = []
        self.steps: list[float] = []
        self.ends: list[float] = []
        self._opened = self._stepped = 0.0

    def begin(self, phase: str, first: int, steps: int) -> None:
        self._opened = time.perf_counter()

    def step(self, done: int, losses: Sequence[Tensor]) -> None:
        self._stepped = time.perf_counter()

    def window(self, record: WindowRecord, bases: dict[str, float]) -> None:
        now = time.perf_counter()
        end = record.closing + now - self._stepped
        self.steps.append((now - self._opened - end) / (record.stop - record.start))
        self.ends.append(end)
        self._opened = now
        self.records.append(record)
        if len(self.records) == self.windows:
            raise _EnoughError
