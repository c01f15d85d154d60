"""One process at a time in a cell's folder, on this machine or on another that shares the disk."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = ".lock"


@contextmanager
def turn(folder: Path) -> Iterator[int | None]:
    """Hold a folder; yields `None` where another process does, else the lock's file descriptor.

    The lock is the system's own (flock): it goes with the last process that has the descriptor open, however that
    ends, and never has to be cleaned up. A child that was handed the descriptor goes on holding it.
    """
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
