"""A study's folder: a run folder for each different cell, and what has come of them so far."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hdet.errors import HdetError
from hdet.history import History
from hdet.running.config import RunConfig
from hdet.running.document import dump
from hdet.study.cells import Cell
from hdet.study.declaration import Study
from hdet.study.statistics import Levels

DIVERGED = "diverged.json"


class StudyFolder:
    """`study.yaml`, `cells/KEY/` with an ordinary run folder each, `cells.csv`, tables and pictures."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def begin(self, study: Study) -> None:
        """Make the folder, or go on in it: finished cells that are still asked for are not run again."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "study.yaml").write_text(dump(study), encoding="utf-8")

    def cell(self, cell: Cell) -> Path:
        """The run folder of a cell."""
        return self.path / "cells" / cell.key

    def done(self, cell: Cell) -> bool:
        """Whether the cell is finished: with a result, or for good without one because it diverged."""
        folder = self.cell(cell)
        return (folder / "result.json").exists() or (folder / DIVERGED).exists()

    def result(self, cell: Cell) -> dict[str, Any] | None:
        """What the cell ended with; `{}` where it diverged, `None` where it is not finished.

        Raises:
            HdetError: its result is no mapping.
        """
        path = self.cell(cell) / "result.json"
        if not path.exists():
            return {} if self.done(cell) else None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise HdetError(f"{path} is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise HdetError(f"{path} must hold a mapping of metrics, it holds a {type(found).__name__}")
        return found

    def metric(self, cell: Cell, name: str) -> float | None:
        """A number of the cell's result; NaN where the run diverged, `None` where it is not finished.

        Raises:
            HdetError: the result has no such number.
        """
        result = self.result(cell)
        if result is None:
            return None
        if not result:
            return math.nan
        if name not in result:
            known = sorted(key for key, value in result.items() if isinstance(value, (int, float)))
            raise HdetError(f"{self.cell(cell) / 'result.json'} has no {name!r}; it has {known}")
        value = result[name]
        return math.nan if value is None else float(value)

    def groups(self, cells: Sequence[Cell], metric: str) -> dict[Levels, dict[int, float]]:
        """The finished cells' values of a metric, by combination of levels and by seed."""
        found: dict[Levels, dict[int, float]] = {}
        for cell in cells:
            value = self.metric(cell, metric)
            if value is not None:
                found.setdefault(tuple(cell.levels.items()), {})[cell.seed] = value
        return found

    def curves(self, cells: Sequence[Cell]) -> dict[Levels, list[list[tuple[int, float]]]]:
        """The finished cells' training losses, (step, loss) at each window's end, a curve a seed."""
        found: dict[Levels, list[list[tuple[int, float]]]] = {}
        for cell in cells:
            path = self.cell(cell) / "history.jsonl"
            if self.done(cell) and path.exists():
                curve = [(record.stop, record.loss) for record in History(path)]
                found.setdefault(tuple(cell.levels.items()), []).append(curve)
        return found

    def write_cells(self, cells: Sequence[Cell], metrics: Sequence[str]) -> None:
        """`cells.csv`: one line a finished cell, with its folder."""
        finished = [cell for cell in cells if self.done(cell)]
        factors = list(finished[0].levels) if finished else []
        with (self.path / "cells.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*factors, "seed", "steps", "samples", "seconds", *metrics, "folder"])
            for cell in finished:
                result = self.result(cell) or {}
                writer.writerow(
                    [
                        *cell.levels.values(),
                        cell.seed,
                        result.get("steps", ""),
                        "" if cell.samples is None else cell.samples,
                        result.get("seconds", ""),
                        *(repr(self.metric(cell, metric)) for metric in metrics),
                        f"cells/{cell.key}",
                    ]
                )

    def write(self, name: str, text: str) -> Path:
        """A file beside the cells."""
        path = self.path / name
        path.write_text(text, encoding="utf-8")
        return path


class Timings:
    """Seconds a step of a run takes, measured once and kept: a continued study plans the same cells."""

    def __init__(self, path: Path | None, measure: Callable[[RunConfig], float]) -> None:
        self._path = path
        self._measure = measure
        self._known: dict[str, float] = json.loads(path.read_text()) if path is not None and path.exists() else {}

    def __call__(self, config: RunConfig) -> float:
        given: Mapping[str, Any] = config.to_dict()
        text = json.dumps({key: value for key, value in given.items() if key not in ("seed", "steps")}, sort_keys=True)
        if text not in self._known:
            self._known[text] = self._measure(config)
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                aside = self._path.with_name(self._path.name + ".part")
                aside.write_text(json.dumps(self._known))
                os.replace(aside, self._path)
        return self._known[text]
