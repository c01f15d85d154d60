"""A cell: one run of one contender on one task, and the file that says how it ended."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import hdet
from hdet.app.study.cells import content_key
from hdet.errors import DivergedError
from search_parts.contender import Contender
from search_parts.meter import Meter
from search_parts.task import Setting, Task


@dataclass(frozen=True)
class Cell:
    """What is run. Two cells with the same content are the same run."""

    task: str
    contender: str
    setting: Setting
    steps: int
    seed: int

    @classmethod
    def of(cls, task: Task, contender: Contender, setting: Setting, seed: int) -> Cell:
        """The cell of a contender that begins a task from a setting."""
        return cls(task.name, contender.name, contender.canonical(task, setting), task.steps, seed)

    @property
    def path(self) -> Path:
        """Its file, relative to the folder of results."""
        key = content_key([asdict(self.setting), self.steps])
        return Path(self.task) / self.contender / f"{key}-seed{self.seed}.json"

    def __str__(self) -> str:
        s = self.setting
        begins = f"lr={s.lr:.3g} decay={s.decay:.3g} dropout={s.dropout:.3g}"
        return f"{self.task} {self.contender} {begins} seed={self.seed}"


@dataclass(frozen=True)
class Result:
    """How a cell ended.

    Attributes:
        test: mean test loss; NaN where the run failed.
        forward, backward: example-passes. cost: their weighted sum over the budget.
        seconds: of this process's CPU time.
        code: hash of the library's source that ran.
        details: the contender's own.
    """

    test: float
    forward: int
    backward: int
    cost: float
    seconds: float
    code: str
    details: dict[str, Any]


def run(task: Task, contender: Contender, cell: Cell) -> Result:
    """Run a cell. Divergence is a result; any other error is raised."""
    meter = Meter()
    torch.set_num_threads(1)
    contender.prepare(task, cell.setting)
    began = time.process_time()
    details: dict[str, Any] = {}
    test = math.nan
    try:
        outcome = contender.run(task, cell.setting, cell.seed, meter)
    except DivergedError as error:
        details["failed"] = str(error)
    else:
        details.update(outcome.details)
        if outcome.model is not None:
            with meter.paused():
                test = outcome.problem.test_loss(outcome.model)
    return Result(
        test=test,
        forward=meter.forward,
        backward=meter.backward,
        cost=meter.passes / task.budget,
        seconds=time.process_time() - began,
        code=code_hash(),
        details=details,
    )


def load(folder: Path, cell: Cell) -> Result | None:
    """A finished cell's result."""
    path = folder / cell.path
    if not path.exists():
        return None
    stored = json.loads(path.read_text())["result"]
    return Result(**{**stored, "test": math.nan if stored["test"] is None else stored["test"]})


def save(folder: Path, cell: Cell, result: Result) -> None:
    """Write the file whole or not at all."""
    path = folder / cell.path
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = asdict(result)
    if not math.isfinite(result.test):
        stored["test"] = None  # JSON has no NaN
    partial = path.with_suffix(f".{os.getpid()}.partial")  # of this process: another may run the same cell
    partial.write_text(json.dumps({"cell": asdict(cell), "result": stored}, indent=1))
    partial.replace(path)


@lru_cache(maxsize=1)
def code_hash() -> str:
    """Of the library's source, so that a report can tell when its cells come from several versions."""
    root = Path(hdet.__file__).parent
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
