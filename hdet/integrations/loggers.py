"""Where a search's windows are written: `search.on_window(hdet.loggers.TensorBoard("runs/one"))`."""

from __future__ import annotations

import json
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from statistics import median_high
from typing import Any

import torch.distributed as dist

from hdet.errors import ConfigError, MissingExtraError
from hdet.record import WindowRecord
from hdet.user_warning import warn

MOST_EACH = 8
"""Knobs of one kind that are logged each by its name."""
TWICE = 2
"""Times that windows went back, after which they are of several searches: one goes back where a state is loaded."""

_written: dict[tuple[str, str | None, str], tuple[int, int]] = {}
"""By kind, place and prefix of loggers, the step that was written last, and how often windows went back."""


def metrics(record: WindowRecord, prefix: str = "hdet") -> dict[str, float]:
    """A window's outcome, its names in groups after a prefix; what is not finite is left out.

    | name | is |
    |---|---|
    | `hdet/value/KNOB` | what was learned: the value at the peak of the knob's schedule |
    | `hdet/factor/KNOB` | that value, divided by the one that was set |
    | `hdet/now/KNOB` | the base in force at the window's last step, schedule included |
    | `hdet/evidence/KNOB` | the estimated slope in standard errors (t): beyond 2 it says something |
    | `hdet/window/loss` | the mean training loss, where it was told |
    | `hdet/window/steps`, `hdet/window/seconds`, `hdet/window/closing` | length, wall time, the part spent at its end |
    | `hdet/window/faults` | how many things went wrong |

    Of several groups' knobs of one kind, as rates of many matrices, KIND alone is the one in the middle; of more than
    8 the others are `KIND[lowest]` and `KIND[highest]`, and `search.history` has each.
    """
    learned = record.learned
    told = {
        "value": {name: own["closed"] for name, own in learned.items()},
        "factor": {name: own["closed"] / own["start"] for name, own in learned.items() if own["start"] != 0.0},
        "now": record.bases,
        "evidence": {name: own["t"] for name, own in record.estimates.items() if own.get("t") is not None},
    }
    found = {f"{prefix}/{what}/{name}": value for what, own in told.items() for name, value in _summed_up(own).items()}
    found[f"{prefix}/window/loss"] = record.loss
    found[f"{prefix}/window/steps"] = float(record.stop - record.start)
    found[f"{prefix}/window/seconds"] = record.seconds
    found[f"{prefix}/window/closing"] = record.closing
    found[f"{prefix}/window/faults"] = float(len(record.faults))
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def _summed_up(told: Mapping[str, float]) -> dict[str, float]:
    """Numbers of knobs by name; of several of one kind also the middle, and of more than `MOST_EACH` only the ends."""
    kinds: dict[str, list[str]] = {}
    for name in told:
        kinds.setdefault(name.partition("[")[0], []).append(name)
    found: dict[str, float] = {}
    for kind, names in kinds.items():
        ordered = sorted(told[name] for name in names)
        ends = {f"{kind}[lowest]": ordered[0], f"{kind}[highest]": ordered[-1]}
        found |= ends if len(names) > MOST_EACH else {name: told[name] for name in names}
        if len(names) > 1:
            found.setdefault(kind, median_high(ordered))
    return found


class WindowLogger(ABC):
    """Writes each window's numbers; a subclass says where, by `write`.

    Only rank 0 writes. A logger that fails warns once and writes no more: training goes on.

    Args:
        prefix: what all names begin with. Several searches that write to one place have one each, in loggers of their
            own.
    """

    place: str | None = None
    """What tells where it writes: there, loggers with one prefix write one series. None for nobody else there."""

    def __init__(self, *, prefix: str = "hdet") -> None:
        if not (isinstance(prefix, str) and prefix):
            raise ConfigError(f"prefix must be a name, such as 'hdet', and is {prefix!r}")
        self._prefix = prefix
        self._failed = False
        self._written: dict[tuple[str, str | None, str], tuple[int, int]] = {}

    @abstractmethod
    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Write numbers by name, for the optimizer step that a window stopped at."""

    def __call__(self, record: WindowRecord) -> None:
        """A window has closed."""
        if self._failed or (dist.is_available() and dist.is_initialized() and dist.get_rank() != 0):
            return
        try:
            self.write(metrics(record, self._prefix), record.stop)
            series = (type(self).__name__, self.place, self._prefix)
        except Exception as error:  # whatever a service or a disk can raise
            self._failed = True
            warn(
                f"{type(self).__name__} could not write window {record.window} ({type(error).__name__}: {error}) and "
                f"is left out from now on; training goes on, and search.history has every window"
            )
        else:
            self._notice_others(series, record)

    def _notice_others(self, series: tuple[str, str | None, str], record: WindowRecord) -> None:
        """Say it once where the windows of a series are of several searches. A first window begins a run."""
        written = _written if series[1] is not None else self._written
        last, times = written.get(series, (0, 0)) if record.window else (0, 0)
        back = record.start < last
        written[series] = (record.stop, times + back)
        if back and times + 1 == TWICE:
            warn(
                f"the windows that {type(self).__name__} writes as {self._prefix}/... are of several searches, whose "
                f"series overwrite each other: give each search a logger of its own, with another prefix= (or the one "
                f"search has been put back {TWICE} times)"
            )


class JSONLines(WindowLogger):
    """One JSON object a window, appended to a file.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "windows.jsonl"
    >>> JSONLines(path).write({"hdet/value/learning_rate": 0.1}, 5)
    >>> path.read_text()
    '{"step": 5, "hdet/value/learning_rate": 0.1}\\n'
    """

    def __init__(self, path: str | os.PathLike[str], *, prefix: str = "hdet") -> None:
        super().__init__(prefix=prefix)
        self._path = Path(path)
        self.place = str(self._path.resolve())

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Append a line."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")


class TensorBoard(WindowLogger):
    """Scalars of a TensorBoard page.

    Args:
        writer: a folder for event files, or a `torch.utils.tensorboard.SummaryWriter`.
        prefix: of `WindowLogger`.

    Raises:
        MissingExtraError: TensorBoard is not installed.
    """

    def __init__(self, writer: Any, *, prefix: str = "hdet") -> None:
        super().__init__(prefix=prefix)
        self._folder = None if hasattr(writer, "add_scalar") else writer
        self._writer = writer if self._folder is None else None
        if self._folder is not None:
            _require("tensorboard")
        self.place = str(self._folder) if self._folder is not None else getattr(writer, "log_dir", None)

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Add a point to each curve."""
        if self._writer is None:  # made here, so that rank 0 alone has a file
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder))
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


class WandB(WindowLogger):
    """Curves of a Weights & Biases run, over `PREFIX/step`, so that the run's own step count is left alone.

    Args:
        run: what `wandb.init` returned; on ranks other than 0 it may be None.
        prefix: of `WindowLogger`.
    """

    def __init__(self, run: Any, *, prefix: str = "hdet") -> None:
        super().__init__(prefix=prefix)
        self._run = run
        self._defined = False
        self.place = getattr(run, "id", None)

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Log a row."""
        if not self._defined:
            self._run.define_metric(f"{self._prefix}/step", hidden=True)
            self._run.define_metric(f"{self._prefix}/*", step_metric=f"{self._prefix}/step")
            self._defined = True
        self._run.log({**metrics, f"{self._prefix}/step": step})


class MLflow(WindowLogger):
    """Metrics of an MLflow run.

    Args:
        run_id: of a run; by default the one that is active when a window closes.
        prefix: of `WindowLogger`.

    Raises:
        MissingExtraError: MLflow is not installed.
    """

    def __init__(self, run_id: str | None = None, *, prefix: str = "hdet") -> None:
        super().__init__(prefix=prefix)
        _require("mlflow")
        self._run_id = self.place = run_id

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Log a batch; characters that MLflow takes in no name become `_`."""
        import mlflow

        named = {re.sub(r"[^\w\-./: ]", "_", name): value for name, value in metrics.items()}
        mlflow.log_metrics(named, step=step, run_id=self._run_id)
        if self._run_id is None and (active := mlflow.active_run()) is not None:
            self.place = active.info.run_id


class Trackio(WindowLogger):
    """Curves of a trackio run, over optimizer steps.

    Args:
        run: what `trackio.init` returned; on ranks other than 0 it may be None.
        prefix: of `WindowLogger`.
    """

    def __init__(self, run: Any, *, prefix: str = "hdet") -> None:
        super().__init__(prefix=prefix)
        self._run = run
        name = getattr(run, "name", None)
        self.place = None if name is None else f"{getattr(run, 'project', '')}/{name}"

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Log a row."""
        self._run.log(dict(metrics), step=step)


def _require(package: str) -> None:
    try:
        __import__(package)
    except ImportError:
        raise MissingExtraError(package, "loggers") from None
