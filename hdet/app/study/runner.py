"""Running a study's cells: each once, several at a time, those of a killed study resumed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hdet.app.run.config import RunConfig
from hdet.app.run.runner import Run
from hdet.app.study.cells import Cell
from hdet.app.study.folder import DIVERGED, FINISHED, RESULT, StudyFolder, finished, read_result
from hdet.app.study.pool import children, several
from hdet.errors import ConfigError, DivergedError, HdetError
from hdet.files import replace

ELSEWHERE = "running elsewhere, in another process"
ERROR = "error.txt"
LOCK = ".lock"
FAILED_RESULT = "result.failed.json"

Outcome = tuple[Cell, str | None]


def pending(folder: StudyFolder, cells: Sequence[Cell]) -> list[Cell]:
    """The cells still to run, one for each folder."""
    unique = {cell.key: cell for cell in reversed(cells)}
    return [cell for cell in reversed(unique.values()) if not folder.done(cell)]


def require_locks() -> None:
    """Cells can be held on this system; a ConfigError says that they cannot."""
    try:
        import fcntl  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError(
            "studies lock their cells by flock, which only POSIX systems have (Linux, macOS, WSL); run this one there, "
            "or each of its runs by hdet run"
        ) from None


def run(folder: StudyFolder, cells: Sequence[Cell], *, jobs: int = 1) -> Iterator[Outcome]:
    """Run what is pending, `jobs` cells at a time in processes of their own; yields each as it ends.

    A cell that diverges is finished: that is its result. Any other error ends only its own cell, which is
    tried again when the study is continued; the message comes with it. A cell that another process is at comes
    with `ELSEWHERE`.

    Raises:
        ConfigError: this is no POSIX system.
    """
    require_locks()
    todo = pending(folder, cells)
    configs = [cell.config.to_dict() if cell.config is not None else None for cell in todo]
    work = [(config, cell.command, str(folder.cell(cell))) for config, cell in zip(configs, todo, strict=True)]
    for place, result in several(run_cell, work, jobs=jobs):
        if isinstance(result, Exception):
            result = str(result) if isinstance(result, HdetError) else f"{type(result).__name__}: {result}"
        yield todo[place], result


def run_cell(config: dict[str, Any] | None, command: tuple[str, ...] | None, out: str) -> str | None:
    """Run one cell in its folder; returns an error's message, or `None`. The traceback is left in the folder."""
    folder = Path(out)
    with turn(folder) as lock:
        if lock is None:
            return ELSEWHERE
        if finished(folder, script=config is None):  # by another process, since this one looked
            return None
        (folder / ERROR).unlink(missing_ok=True)
        try:
            if config is not None:
                _train(RunConfig.from_dict(config), folder)
            else:
                assert command is not None
                _call(command, folder, lock)
        except Exception as error:
            told = f"see {folder / ERROR}"
            try:
                replace(folder / ERROR, traceback.format_exc().encode())
            except OSError as full:  # a full disk is to end no other cell
                told = f"{folder / ERROR} could not be written ({full})"
            if isinstance(error, HdetError):
                return str(error)
            said = f"{type(error).__name__}: {str(error) or 'no message'}".splitlines()[0]
            return f"{said}; {told}"
    return None


@contextmanager
def turn(folder: Path) -> Iterator[int | None]:
    """Hold a folder; yields `None` where another process does, else the lock's file descriptor.

    The lock is the system's own (flock): it goes with the last process that has the descriptor open, however that
    ends, and never has to be cleaned up. A child that was handed the descriptor goes on holding it.
    """
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield lock
    finally:
        os.close(lock)


def _train(config: RunConfig, out: Path) -> None:
    begun = (out / "config.yaml").exists()
    try:
        # Without a configuration nothing was begun, whatever a kill may have left.
        Run(config, out, resume=begun, force=not begun)()
    except DivergedError as error:
        replace(out / DIVERGED, json.dumps({"error": str(error)}).encode())


def _call(command: tuple[str, ...], out: Path, lock: int) -> None:
    """Run a script from its beginning, in an empty folder."""
    _empty(out)
    words = [word.replace("{out}", str(out)).replace("{python}", sys.executable) for word in command]
    began = time.perf_counter()
    with (out / "log.txt").open("w", encoding="utf-8") as log:
        try:
            # The script holds the cell too: where it outlives this process, no other may start it again.
            script = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, pass_fds=(lock,))
        except OSError as error:
            raise HdetError(f"{words[0]!r} cannot be run: {error}") from None
        children.add(script)
        try:
            code = script.wait()
        except BaseException:
            script.kill()
            raise
        finally:
            children.discard(script)
    seconds = time.perf_counter() - began
    result = out / RESULT
    if code != 0:
        if result.exists():
            result.rename(out / FAILED_RESULT)
        raise HdetError(f"{' '.join(words)} ended with code {code}; see {out / 'log.txt'}")
    if not result.exists():
        raise HdetError(f"{' '.join(words)} wrote no {result}")
    read_result(result)
    replace(out / FINISHED, json.dumps({"seconds": seconds}).encode())


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()
