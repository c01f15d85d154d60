"""The course that a run's knob took, step by step, read off its windows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from hdet.errors import ConfigError
from hdet.record import TURNS, WindowRecord
from hdet.spec import meant, some


def recorded_course(windows: Iterable[WindowRecord], knob: str, total_steps: int | None = None) -> tuple[float, ...]:
    """A knob's base at every step of a run, or what a population found in its place, to the last bit.

    Of a run that went back to an earlier point it is the course of the steps that led to the final weights
    (`kept_steps`), stretched over all the run's steps.

    Args:
        windows: the run's, from the first: a `hdet.History`, say.
        knob: as the history names it.
        total_steps: stretch or shrink the course to this many steps; by default it has the run's.

    Raises:
        ConfigError: there is no window, no such knob, a step whose base the history does not hold, or no step whose
            work was kept.
    """
    windows = list(windows)
    if windows and knob in windows[-1].best_schedule:
        course: Sequence[float] = windows[-1].best_schedule[knob]
    else:
        course = _every_base(windows, knob)
    kept = kept_steps(windows)
    if not kept:
        raise ConfigError(
            f"the run went back to where it began in its last window, so no step led to its final weights and there is "
            f"no course of {knob!r} to replay; train on, or start from lower values"
        )
    steps = len(course) if total_steps is None else total_steps
    return tuple(course) if steps == len(kept) == len(course) else stretched([course[step] for step in kept], steps)


def kept_steps(windows: Sequence[WindowRecord]) -> list[int]:
    """The steps that led to the final weights: all but those that a return to an earlier point threw away.

    Nothing is known of steps before the first window; these are taken to have been kept.

    >>> back = {"kind": "rewound", "step": 1}
    >>> kept_steps([
    ...     WindowRecord(0, 0, 3, {}, {}, [], {}, {}, False, faults=[back]),
    ...     WindowRecord(1, 3, 5, {}, {}, [], {}, {}, False),
    ... ])
    [0, 3, 4]
    """
    kept = list(range(windows[0].start if windows else 0))
    for record in windows:
        kept.extend(range(record.start, record.stop))
        for fault in record.faults:
            if fault.get("kind") in TURNS:
                del kept[bisect_left(kept, fault["step"]) :]
    return kept


def _every_base(windows: Sequence[WindowRecord], knob: str) -> list[float]:
    course: list[float] = []
    for record in windows:
        if knob not in record.bases:
            several = [name for name in record.bases if name.startswith(f"{knob}[")]
            if several:
                raise ConfigError(
                    f"the run had {len(several)} knobs of {knob!r}, each with a course of its own: {some(several)}; "
                    f"name one of them, or replay all by hdet.ReplayLR(optimizer, history, model=model)"
                )
            known = sorted(record.bases)
            raise ConfigError(f"window {record.window} has no knob {knob!r}; it has {some(known)}{meant(knob, known)}")
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
    return course


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
