"""Work for several processes: each piece by itself, and all of them end with the process that asked."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch

from hdet.errors import HdetError

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
    waiting = iter(enumerate(work))
    running: dict[Future[T], tuple[int, ProcessPoolExecutor | None]] = {}
    with ExitStack() as pools:

        def begin(pool: ProcessPoolExecutor | None = None) -> None:
            """Let a worker take the next piece that waits, if one does; a new one where it has died since its last."""
            place, arguments = next(waiting, (None, ()))
            if place is None:
                return
            with _deaf():
                try:
                    future = pool.submit(function, *arguments) if pool is not None else None
                except BrokenProcessPool:
                    future = None
                if future is None:
                    pool = pools.enter_context(_worker())
                    future = pool.submit(function, *arguments)
                running[future] = place, pool

        try:
            for _ in range(max(1, jobs)):
                begin()
            while running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    place, pool = running.pop(future)
                    error = future.exception()
                    if isinstance(error, BrokenProcessPool):
                        pool, error = None, HdetError("its process died, as one that the system kills for memory")
                    if error is not None and not isinstance(error, Exception):
                        raise error
                    yield place, future.result() if error is None else error
                    begin(pool)
        except KeyboardInterrupt:
            for worker in multiprocessing.active_children():  # the pools break by that, and end their futures
                worker.terminate()
            raise


def _worker() -> ProcessPoolExecutor:
    """A pool of one process: where that is killed, those of other pieces go on.

    Spawned, not forked: a forked child inherits torch's thread pool in whatever state it is.
    """
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_begin)


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
