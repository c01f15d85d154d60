"""Work for several processes: each piece by itself, and all of them end with the process that asked."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")

THREADS = 1
"""torch's, in a worker: several share the machine."""

children: set[subprocess.Popen[bytes]] = set()
"""Processes that a worker has started, which end with it."""


def several(
    function: Callable[..., T], work: Sequence[tuple[Any, ...]], *, jobs: int
) -> Iterator[tuple[int, T | Exception]]:
    """`function(*arguments)` for each piece of work, `jobs` at a time; yields its place and what came of it.

    With one job at a time it is called in this process, and raises what it raises. Else an error that a piece ends
    with, or the death of its process, comes in the place of its result, and the others go on. Pieces that have not
    begun are given up where the caller stops. An interrupt ends all workers: they are not told of Ctrl-C themselves, so
    that they leave no traceback.

    Args:
        function: importable by name, since each worker is a process of its own.

    >>> list(several(divmod, [(7, 2), (9, 4)], jobs=1))
    [(0, (3, 1)), (1, (2, 1))]
    """
    if jobs == 1:
        for place, arguments in enumerate(work):
            yield place, function(*arguments)
        return
    # Spawned, not forked: a forked child inherits torch's thread pool in whatever state it is.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(work)) or 1, mp_context=context, initializer=_begin) as pool:
        with _deaf():
            places = {pool.submit(function, *arguments): place for place, arguments in enumerate(work)}
        try:
            for future in as_completed(places):
                error = future.exception()
                if error is not None and not isinstance(error, Exception):
                    raise error
                yield places[future], future.result() if error is None else error
        except KeyboardInterrupt:
            # The pool breaks by that and ends every future, which must not have been cancelled.
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise
        except BaseException:
            for future in places:
                future.cancel()
            raise


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes that are started inside the block ignore Ctrl-C from their first moment on."""
    if threading.current_thread() is not threading.main_thread():  # where signals cannot be set
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _begin() -> None:
    signal.signal(signal.SIGTERM, lambda *_: _end())
    torch.set_num_threads(THREADS)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A process that is killed cannot tell its workers, and they would work on without it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    _end()


def _end() -> None:
    for child in list(children):
        child.kill()
    os._exit(1)
