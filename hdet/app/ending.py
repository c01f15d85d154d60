"""How a command ends: its exit codes, and what ends it before its time."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

FAILED, REFUSED = 1, 2
INTERRUPTED, TERMINATED, UNREAD = 130, 143, 141


class Terminated(KeyboardInterrupt):
    """This process was told to end by SIGTERM, as batch systems do it, and ends as it does by Ctrl-C."""


class OutputClosed(KeyboardInterrupt):
    """Nobody reads a command's output any more, as after `| head`: the command ends as by Ctrl-C."""


class OutputFailed(KeyboardInterrupt):
    """A command's output cannot be written to, as on a full disk; it ends as by Ctrl-C. Its argument says why."""


@contextmanager
def terminable() -> Iterator[None]:
    """A SIGTERM raises `Terminated` inside the block, unless it is handled already or this is no main thread."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def ended_early(error: KeyboardInterrupt, more: str = "") -> int:
    """Say on the error stream why this process ends before its time, and `more`; returns the exit code.

    Of an output that nobody reads nothing is said without `more`, as the system's own commands do it.
    """
    kinds = {
        Terminated: ("terminated", TERMINATED),
        OutputClosed: ("nobody reads the output any more", UNREAD),
        OutputFailed: (f"error: nothing more can be printed: {error}", FAILED),
    }
    word, code = kinds.get(type(error), ("interrupted", INTERRUPTED))
    if more or code != UNREAD:
        print(f"{word}{more}", file=sys.stderr)
    return code
