"""The course that a run's knob took, step by step, read off its windows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hdet.errors import ConfigError
from hdet.record import WindowRecord
from hdet.spec import meant


def recorded_course(windows: Iterable[WindowRecord], knob: str) -> tuple[float, ...]:
    """A knob's base at every step of a run, or what a population found in its place, to the last bit.

    Args:
        windows: the run's, from the first: a `hdet.History`, say.
        knob: as the history names it.

    Raises:
        ConfigError: there is no window, no such knob, or a step whose base the history does not hold.
    """
    course: list[float] = []
    windows = list(windows)
    if windows and knob in windows[-1].best_schedule:
        return tuple(windows[-1].best_schedule[knob])
    for record in windows:
        if knob not in record.bases:
            known = sorted(record.bases)
            raise ConfigError(f"window {record.window} has no knob {knob!r}; it has {known}{meant(knob, known)}")
        if record.start != len(course):
            raise ConfigError(
                f"the history begins at step {record.start}, so the course of {knob!r} before it is not known; give "
                f"the history of the whole run"
            )
        bases = record.course.get(knob)
        if bases is None:
            raise ConfigError(
                f"the history holds {knob!r} at windows' ends only, as hdet 0.1.0 wrote it or as a long run without a "
                f"file does, or it is the knob of a population, which is told at the run's end; train on, or anew with "
                f"history='history.jsonl', to replay the run, or set the learned values that hdet report names"
            )
        course.extend(bases if len(bases) > 1 else bases * (record.stop - record.start))
    if not course:
        raise ConfigError("the history has no window yet, so there is no course to replay")
    return tuple(course)


def stretched(course: Sequence[float], total_steps: int) -> tuple[float, ...]:
    """The same course over another number of steps: its first and last values stay, straight lines lie between.

    >>> stretched((0.0, 1.0, 0.5), 5)
    (0.0, 0.5, 1.0, 0.75, 0.5)
    """
    if total_steps < 1:
        raise ConfigError(f"total_steps is a number of steps, at least 1; got {total_steps}")
    last, gaps = len(course) - 1, max(total_steps - 1, 1)
    made = []
    for step in range(total_steps):
        before, rest = divmod(step * last, gaps)
        value = course[before]
        made.append(value + (course[before + 1] - value) * (rest / gaps) if rest else value)
    return tuple(made)
