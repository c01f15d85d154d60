"""What a step of a run costs in wall time, measured before a study is planned."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from hdet.app.planning.pilot import pilot
from hdet.app.run.config import RunConfig
from hdet.app.study.folder import written
from hdet.errors import ConfigError, HdetError
from hdet.files import replace

# The first of them pays for what is made at the first call, and is thrown away.
TIMED_WINDOWS = 5
LONGEST_WINDOW = 25


def seconds_per_step(config: RunConfig, *, threads: int | None = None) -> float:
    """Wall time of a step, with its share of what the run's windows' ends cost, from a pilot in short windows.

    Args:
        threads: torch's, as many as the run will have; by default those of this process.
    """
    window = max(1, min(LONGEST_WINDOW, config.window.at(0), config.steps // TIMED_WINDOWS))
    steps = min(config.steps, TIMED_WINDOWS * window)
    # From where it sets out makes no difference to its time, and a dry run may come before that is made. Its length
    # stays, for warm-ups and schedules that a shorter run would not hold: the pilot ends it.
    short = RunConfig.from_dict({**config.to_dict(), "window": window, "start": None})
    before = torch.get_num_threads()
    torch.set_num_threads(before if threads is None else threads)
    try:
        measured = pilot(short, short.window.count(0, steps))
    finally:
        torch.set_num_threads(before)
    return measured.seconds(config.steps, config.window.count(0, config.steps))[0] / config.steps


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
        """Of this run; a ConfigError where it was not timed, and is not to be timed now."""
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
                with written(self._path.parent):
                    replace(self._path, json.dumps(self._known).encode())
        return self._known[text]


def _read(path: Path) -> dict[str, float]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {str(run): float(seconds) for run, seconds in found.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise HdetError(f"{path} holds no timings ({error}); remove it, and the runs are timed anew") from None
