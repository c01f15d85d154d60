"""A study's folder: a run folder for each different cell, and what has come of them so far."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hdet import __version__
from hdet.app.study.cells import Cell
from hdet.app.study.declaration import Study
from hdet.app.study.statistics import Levels
from hdet.document import dump
from hdet.errors import ConfigError, HdetError
from hdet.files import replace
from hdet.history import History

T = TypeVar("T")

# What marks a cell as over, last of all that is written: a run's result or divergence, a script's end in good order.
RESULT = "result.json"
DIVERGED = "diverged.json"
FINISHED = "finished.json"


def finished(folder: Path, *, script: bool) -> bool:
    """Whether the cell in a folder is over."""
    return any((folder / name).exists() for name in ((FINISHED,) if script else (RESULT, DIVERGED)))


@contextmanager
def written(folder: Path) -> Iterator[None]:
    """Make a study's folder, for what the block writes into it.

    Raises:
        ConfigError: the folder cannot be made, or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError(f"{folder} cannot be a study's folder: {error}; choose another --out") from None


class StudyFolder:
    """`study.yaml`, `cells/KEY/` with an ordinary run folder each, `cells.csv`, tables and pictures."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def begin(self, study: Study) -> str:
        """Make the folder, or go on in it: finished cells that are still asked for are not run again.

        Returns the version of hdet that began it, whose cells may lie in it.

        Raises:
            ConfigError: it cannot be made, or written to.
        """
        version = self.path / "version.txt"
        with written(self.path):
            self.write("study.yaml", dump(study))
            if not version.exists():
                self.write(version.name, __version__ + "\n")
        return version.read_text(encoding="utf-8").strip()

    def cell(self, cell: Cell) -> Path:
        """The run folder of a cell."""
        return self.path / "cells" / cell.key

    def done(self, cell: Cell) -> bool:
        """Whether the cell is finished: with a result, or for good without one because it diverged."""
        return finished(self.cell(cell), script=cell.config is None)

    def result(self, cell: Cell) -> dict[str, Any] | None:
        """What the cell ended with; `{}` where it diverged, `None` where it is not finished."""
        if not self.done(cell):
            return None
        path = self.cell(cell) / RESULT
        return read_result(path) if path.exists() else {}

    def metric(self, cell: Cell, name: str) -> float | None:
        """A number of the cell's result; NaN where the run diverged, `None` where it is not finished.

        Raises:
            HdetError: the result has no such number.
        """
        result = self.result(cell)
        if result is None:
            return None
        path = self.cell(cell) / RESULT
        if not path.exists():
            return math.nan
        if name not in result:
            known = sorted(key for key, value in result.items() if isinstance(value, (int, float)))
            raise HdetError(f"{path} has no {name!r}; it has {known}")
        value = result[name]
        if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
            raise HdetError(f"{path}: {name} must be a number, or null where the run diverged; got {value!r}")
        return math.nan if value is None else float(value)

    def seconds(self, cell: Cell) -> float | None:
        """Wall time of a finished cell, where it is known."""
        path = self.cell(cell) / FINISHED
        if cell.config is None and path.exists():
            try:
                return float(read_result(path)["seconds"])
            except (KeyError, TypeError, ValueError):
                raise HdetError(f"{path} does not say how many seconds the script took; remove it") from None
        given = (self.result(cell) or {}).get("seconds")
        return float(given) if isinstance(given, (int, float)) else None

    def groups(
        self, cells: Sequence[Cell], metric: str, problems: list[str] | None = None
    ) -> dict[Levels, dict[int, float | None]]:
        """The cells' values of a metric, by combination of levels and by seed; `None` where there is none yet.

        Args:
            problems: takes a line for each finished cell without such a number; without it the first is raised.
        """
        found: dict[Levels, dict[int, float | None]] = {}
        for cell in cells:
            value = tolerated(partial(self.metric, cell, metric), problems)
            found.setdefault(tuple(cell.levels.items()), {})[cell.seed] = value
        return found

    def curves(self, cells: Sequence[Cell], problems: list[str]) -> dict[Levels, list[list[tuple[int, float]]]]:
        """The finished cells' training losses, (step, loss) at each window's end, a curve a seed."""
        found: dict[Levels, list[list[tuple[int, float]]]] = {}
        for cell in cells:
            path = self.cell(cell) / "history.jsonl"
            if self.done(cell) and path.exists():
                history = tolerated(partial(History, path), problems)
                curve = [(record.stop, record.loss) for record in history or ()]
                found.setdefault(tuple(cell.levels.items()), []).append(curve)
        return found

    def write_cells(self, cells: Sequence[Cell], metrics: Sequence[str], problems: list[str]) -> None:
        """`cells.csv`: one line a finished cell, with its folder."""
        out = io.StringIO()
        writer = csv.writer(out)
        factors = list(cells[0].levels) if cells else []
        writer.writerow([*factors, "seed", "steps", "samples", "seconds", *metrics, "folder"])
        for cell in cells:
            if not self.done(cell):
                continue
            result = tolerated(partial(self.result, cell), problems) or {}
            values = [tolerated(partial(self.metric, cell, metric), problems) for metric in metrics]
            seconds = tolerated(partial(self.seconds, cell), problems)
            spent = (cell.seed, result.get("steps"), cell.samples, seconds)
            writer.writerow([*cell.levels.values(), *spent, *values, f"cells/{cell.key}"])
        self.write("cells.csv", out.getvalue())

    def write(self, name: str, text: str) -> None:
        """A file beside the cells."""
        replace(self.path / name, text.encode())


def read_result(path: Path) -> dict[str, Any]:
    """The metrics a cell wrote."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise HdetError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise HdetError(f"{path} must hold a mapping of metrics, it holds a {type(found).__name__}")
    return found


def tolerated(read: Callable[[], T], problems: list[str] | None) -> T | None:
    """What `read` gives; where it cannot, one line more in `problems`."""
    try:
        return read()
    except HdetError as error:
        if problems is None:
            raise
        if str(error) not in problems:
            problems.append(str(error))
        return None
