"""Running a study's cells: each once, several at a time, those of a killed study resumed."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from hdet.errors import DivergedError, HdetError
from hdet.running.config import RunConfig
from hdet.running.folder import RunFolder
from hdet.running.loop import Training, Watcher
from hdet.running.runner import Run
from hdet.study.cells import Cell
from hdet.study.folder import DIVERGED, StudyFolder

TIMED_STEPS = 25

Outcome = tuple[Cell, str | None]


def pending(folder: StudyFolder, cells: Sequence[Cell]) -> list[Cell]:
    """The cells still to run, one for each folder."""
    unique = {cell.key: cell for cell in reversed(cells)}
    return [cell for cell in reversed(unique.values()) if not folder.done(cell)]


def run(folder: StudyFolder, cells: Sequence[Cell], *, jobs: int = 1) -> Iterator[Outcome]:
    """Run what is pending, `jobs` cells at a time in processes of their own; yields each as it ends.

    A cell that diverges is finished: that is its result. Any other error ends only its own cell, which is
    tried again when the study is continued; the message comes with it.
    """
    todo = pending(folder, cells)
    if jobs == 1:
        for cell in todo:
            yield cell, run_cell(*_job(folder, cell))
        return
    # Spawned, not forked: a forked child inherits torch's thread pool in whatever state it is.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        waiting = {pool.submit(run_cell, *_job(folder, cell)): cell for cell in todo}
        try:
            for future in as_completed(waiting):
                error = future.exception()
                yield (
                    waiting[future],
                    f"{type(error).__name__}: {error}" if error is not None else future.result(),
                )
        finally:
            for future in waiting:
                future.cancel()


def run_cell(config: dict[str, Any] | None, command: tuple[str, ...] | None, out: str) -> str | None:
    """Run one cell in its folder; returns an error's message, or `None`."""
    try:
        if config is not None:
            _train(RunConfig.from_dict(config), Path(out))
        else:
            assert command is not None
            _call(command, Path(out))
    except HdetError as error:
        return str(error)
    return None


def seconds_per_step(config: RunConfig) -> float:
    """Wall time of a step, windows' ends included, measured over a few steps of the run thrown away after."""
    steps = min(config.steps, TIMED_STEPS, max(5, config.window.length(0)))
    short = RunConfig.from_dict({**config.to_dict(), "steps": steps})
    workload = short.task.build(seed=short.seed, batch_size=short.batch_size, device=short.device)
    training = Training(short, workload)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        training.run(RunFolder(folder), Watcher())
        return (time.perf_counter() - began) / steps


def _job(folder: StudyFolder, cell: Cell) -> tuple[dict[str, Any] | None, tuple[str, ...] | None, str]:
    return (cell.config.to_dict() if cell.config is not None else None), cell.command, str(folder.cell(cell))


def _train(config: RunConfig, out: Path) -> None:
    begun = (out / "config.yaml").exists()
    try:
        # Without a configuration nothing was begun, whatever a kill may have left.
        Run(config, out, resume=begun, force=not begun)()
    except DivergedError as error:
        (out / DIVERGED).write_text(json.dumps({"error": str(error)}), encoding="utf-8")


def _call(command: tuple[str, ...], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    words = [word.replace("{out}", str(out)).replace("{python}", sys.executable) for word in command]
    with (out / "log.txt").open("w", encoding="utf-8") as log:
        try:
            code = subprocess.run(words, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        except OSError as error:
            raise HdetError(f"{words[0]!r} cannot be run: {error}") from None
    if code != 0:
        raise HdetError(f"{' '.join(words)} ended with code {code}; see {out / 'log.txt'}")
    if not (out / "result.json").exists():
        raise HdetError(f"{' '.join(words)} wrote no {out / 'result.json'}")
