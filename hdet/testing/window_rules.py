"""The laws of window rules."""

from __future__ import annotations

from hdet.testing.law import require
from hdet.windows import Windows

STEPS = (0, 1, 2, 7, 100, 999, 12345, 10**7)


def a_window_has_a_step(windows: Windows) -> None:
    """A window that opens at any step is a whole number of steps long, at least 1, and always the same."""
    for step in STEPS:
        length = windows.length(step)
        require(isinstance(length, int) and length >= 1, f"length({step}) is {length!r}")
        require(windows.length(step) == length, f"length({step}) was {length} and is {windows.length(step)}")


def count_counts(windows: Windows) -> None:
    """count(start, stop) is the number of windows that are opened from start until stop is reached."""
    for start in (0, 3, 500):
        for stop in (start, start + 1, start + 17, start + 2000):
            step, opened = start, 0
            while step < stop:
                step += windows.length(step)
                opened += 1
            counted = windows.count(start, stop)
            require(counted == opened, f"count({start}, {stop}) is {counted}, but {opened} windows are opened")
