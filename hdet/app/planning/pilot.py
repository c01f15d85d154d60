"""A short pilot: the first windows of a declared run, trained for what they cost and for how noisy its evidence is."""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from hdet.app.run.config import RunConfig
from hdet.app.run.loop import Watcher
from hdet.app.run.runner import Run
from hdet.record import WindowRecord


@dataclass(frozen=True)
class Pilot:
    """What the first windows of a run showed.

    Attributes:
        windows: their records.
        peak_bytes: the most memory in use: of the device, or of this process where the device is the CPU.
        on: what these bytes lie on.
    """

    windows: list[WindowRecord]
    peak_bytes: int
    on: str

    @property
    def step_seconds(self) -> float:
        """Wall time of a step without windows' ends. The first window warms up, and counts only if it is alone."""
        there = self.windows[1:] or self.windows
        steps = sum(record.stop - record.start for record in there)
        return math.fsum(record.seconds - record.closing for record in there) / steps

    @property
    def closing_seconds(self) -> float:
        """Wall time of a window's end: probes, comparisons, the merge."""
        there = self.windows[1:] or self.windows
        return math.fsum(record.closing for record in there) / len(there)

    def seconds(self, steps: int, windows: int) -> tuple[float, float]:
        """What a run of that many steps and windows takes, and the part of it spent at windows' ends."""
        closing = windows * self.closing_seconds
        return steps * self.step_seconds + closing, closing


def pilot(config: RunConfig, windows: int) -> Pilot:
    """Train the first windows of a run in a folder that is thrown away.

    Raises:
        HdetError: as the run itself would.
    """
    device = torch.device(config.device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seen = _Until(windows)
    with tempfile.TemporaryDirectory(prefix="hdet-plan-") as folder, contextlib.suppress(_EnoughError):
        Run(config, Path(folder) / "pilot")(watcher=seen)
    if device.type == "cuda":
        return Pilot(seen.records, torch.cuda.max_memory_allocated(device), str(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Pilot(seen.records, peak if sys.platform == "darwin" else 1024 * peak, "this process")


class _EnoughError(Exception):
    """The pilot's last window has closed."""


class _Until(Watcher):
    """Ends a run after some windows."""

    def __init__(self, windows: int) -> None:
        self.windows = windows
        self.records: list[WindowRecord] = []

    def window(self, record: WindowRecord, bases: dict[str, float]) -> None:
        self.records.append(record)
        if len(self.records) == self.windows:
            raise _EnoughError
