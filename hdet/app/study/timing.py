"""What a step of a run costs in wall time, measured before a study is planned."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hdet.app.run.config import RunConfig
from hdet.app.run.folder import RunFolder
from hdet.app.run.loop import Training, Watcher
from hdet.errors import ConfigError, HdetError
from hdet.files import replace
from hdet.history import WindowRecord

# The first of them pays for what is made at the first call, and is thrown away.
TIMED_WINDOWS = 5
LONGEST_WINDOW = 25


def seconds_per_step(config: RunConfig, *, threads: int | None = None) -> float:
    """Wall time of a step, with its share of what a window's end costs, from a short run that is thrown away.

    Medians over the windows after the first; the ends are shared out over the steps by the run's own windows.

    Args:
        config: the run.
        threads: torch's, as many as the run will have; by default those of this process.
    """
    window = max(1, min(LONGEST_WINDOW, config.window.length(0), config.steps // TIMED_WINDOWS))
    steps = min(config.steps, TIMED_WINDOWS * window)
    # From where it sets out makes no difference to its time, and a dry run may come before that is made.
    short = RunConfig.from_dict({**config.to_dict(), "steps": steps, "window": window, "start": None})
    workload = short.task.build(seed=short.seed, batch_size=short.batch_size, device=short.device)
    training, clock = Training(short, workload), _Clock()
    before = torch.get_num_threads()
    torch.set_num_threads(before if threads is None else threads)
    try:
        with tempfile.TemporaryDirectory() as folder:
            training.run(RunFolder(folder), clock)
    finally:
        torch.set_num_threads(before)
    return clock.seconds_per_step(config.window.count(0, config.steps), config.steps)


class Timings:
    """Seconds a step of a run takes, measured once and kept: a continued study plans the same cells.

    Args:
        path: where they are kept; `None` keeps them in memory.
        measure: times a run; `None` where that was to be done before.
    """

    def __init__(self, path: Path | None, measure: Callable[[RunConfig], float] | None) -> None:
        self._path = path
        self._measure = measure
        self._known = _read(path) if path is not None and path.exists() else {}

    def __call__(self, config: RunConfig) -> float:
        """Of this run.

        Raises:
            ConfigError: it was not timed, and is not to be timed now.
        """
        given: Mapping[str, Any] = config.to_dict()
        text = json.dumps({key: value for key, value in given.items() if key not in ("seed", "steps")}, sort_keys=True)
        if text not in self._known:
            if self._measure is None:
                raise ConfigError(
                    f"{self._path} has no timing of this run, and shards that time for themselves would plan "
                    f"different cells; time all of them once with --dry-run (without --shard, with the same --out, "
                    f"--jobs and --quick), then start the shards"
                )
            self._known[text] = self._measure(config)
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                replace(self._path, json.dumps(self._known).encode())
        return self._known[text]


def _read(path: Path) -> dict[str, float]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {str(run): float(seconds) for run, seconds in found.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise HdetError(f"{path} holds no timings ({error}); remove it, and the runs are timed anew") from None


class _Clock(Watcher):
    """Times windows: what their steps take, and what comes at their end, the checkpoint included."""

    def __init__(self) -> None:
        self._steps: list[float] = []
        self._ends: list[float] = []
        self._opened = self._stepped = 0.0

    def begin(self, phase: str, first: int, steps: int) -> None:
        self._opened = time.perf_counter()

    def step(self, done: int, losses: Sequence[Tensor]) -> None:
        self._stepped = time.perf_counter()

    def window(self, record: WindowRecord, bases: dict[str, float]) -> None:
        now = time.perf_counter()
        end = record.closing + now - self._stepped
        self._steps.append((now - self._opened - end) / (record.stop - record.start))
        self._ends.append(end)
        self._opened = now

    def seconds_per_step(self, windows: int, steps: int) -> float:
        """Of a run with so many windows and steps."""
        step, end = (statistics.median(seconds[1:] or seconds) for seconds in (self._steps, self._ends))
        return step + end * windows / steps
