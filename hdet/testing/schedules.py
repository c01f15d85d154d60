"""The laws of schedules."""

from __future__ import annotations

import math

from hdet.hparams import Schedule
from hdet.testing.law import require

OPEN_END = 1000
SAMPLES = 400


def _steps(schedule: Schedule) -> list[int]:
    """Steps up to the end and somewhat beyond; all of them where they are few."""
    require(hasattr(schedule, "total_steps"), "it has no total_steps: a field or a property, None where it has no end")
    total = schedule.total_steps
    last = OPEN_END if total is None else total + 2
    return sorted({*range(0, last, max(1, last // SAMPLES)), 1, last - 1})


def values_are_finite(schedule: Schedule) -> None:
    """Every step has a finite value, a float."""
    for t in _steps(schedule):
        value = schedule(t)
        require(isinstance(value, float) and math.isfinite(value), f"step {t} has the value {value!r}")


def values_depend_on_the_step_alone(schedule: Schedule) -> None:
    """A step has the same value whenever it is asked for, and from a copy too."""
    steps = _steps(schedule)
    first = [schedule(t) for t in steps]
    copy = Schedule.from_dict(schedule.to_dict())
    for t, value in reversed(list(zip(steps, first, strict=True))):
        again = schedule(t)
        require(again == value, f"step {t} had the value {value!r} and now has {again!r}")
        require(copy(t) == value, f"step {t} has the value {value!r}, and {copy(t)!r} in a copy")


def the_end_is_held(schedule: Schedule) -> None:
    """total_steps is None or a positive number, past which the last value holds."""
    total = schedule.total_steps
    if total is None:
        return
    require(isinstance(total, int) and total > 0, f"total_steps is {total!r}")
    last = schedule(total - 1)
    for t in (total, total + 1, 10 * total):
        require(schedule(t) == last, f"step {t} has the value {schedule(t)!r}, the last step {total - 1} has {last!r}")
