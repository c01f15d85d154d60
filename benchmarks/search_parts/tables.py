"""A report's runs as tables, and an earlier report's read again: what does not use the library need not run again."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hdet.errors import ConfigError
from search_parts import sweep
from search_parts.cell import Result
from search_parts.outcome import Findings, Runs
from search_parts.sweep import Best
from search_parts.task import Setting

CELLS, BEST = "cells.csv", "best.csv"


def write(findings: Findings, folder: Path) -> None:
    """Every run, and every task's best fixed setting."""
    with (folder / CELLS).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["task", "start", "contender", "seed", "test_loss", "failed", "compute", "seconds"])
        for (task, start, contender), runs in findings.runs.items():
            for seed, run in sorted(runs.items()):
                failed = int(sweep.failed(findings.tasks[task], run.test))
                row = [task, start, contender, seed, repr(run.test), failed, f"{run.cost:.5f}", f"{run.seconds:.3g}"]
                writer.writerow(row)
    with (folder / BEST).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["task", "lr", "decay", "dropout", "runs", "at_edge"])
        for task, best in findings.best.items():
            setting = best.setting
            writer.writerow([task, setting.lr, setting.decay, setting.dropout, best.runs, int(best.at_edge)])


@dataclass(frozen=True)
class Earlier:
    """An earlier report.

    Attributes:
        folder: where it lies.
        best: by task, the oracle's setting; its loss in the sweep is not known.
        runs: by (task, start, contender), the results by seed. They do not tell how many passes trained.
    """

    folder: Path
    best: Mapping[str, Best]
    runs: Mapping[tuple[str, str, str], Runs]

    @classmethod
    def read(cls, folder: Path) -> Earlier:
        """The tables of a report's folder.

        Raises:
            ConfigError: they are not there.
        """
        for name in (CELLS, BEST):
            if not (folder / name).exists():
                raise ConfigError(f"{folder} has no {name}; give the folder of a report, such as docs/results/search")
        best = {}
        for row in _rows(folder / BEST):
            setting = Setting(float(row["lr"]), float(row["decay"]), float(row["dropout"]))
            best[row["task"]] = Best(setting, math.nan, int(row["runs"]), row["at_edge"] == "1")
        runs: dict[tuple[str, str, str], Runs] = {}
        for row in _rows(folder / CELLS):
            result = Result(
                test=float(row["test_loss"]),
                forward=0,
                backward=0,
                cost=float(row["compute"]),
                seconds=float(row["seconds"]),
                code="",
                details={},
            )
            runs.setdefault((row["task"], row["start"], row["contender"]), {})[int(row["seed"])] = result
        return cls(folder, best, runs)

    @property
    def contenders(self) -> list[str]:
        """Their names, in the order of the table."""
        return list(dict.fromkeys(name for _, _, name in self.runs))


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
