"""A run as it would go if no base were ever moved: its windows, schedules and levels, before a step is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hdet.engine.engine import Engine
from hdet.errors import ConfigError, StepError
from hdet.hparams.bound_knob import BoundKnob
from hdet.windows import Windows

POINTS = 400
"""About how many steps are looked at."""

MOST_WINDOWS = 100_000
"""Opening as many takes minutes."""


@dataclass
class PlannedKnob:
    """One knob's way through the run.

    Attributes:
        name: as histories call it.
        evidence, controller: the kinds that judge and move it.
        steps: at which the values below are in force.
        bases: the schedule's value at each of these steps.
        low, high: the lowest and the highest value that is in force, or looked at, at each.
    """

    name: str
    evidence: str
    controller: str
    steps: list[int] = field(default_factory=list)
    bases: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Preview:
    """What an engine is about to do.

    Attributes:
        windows: first step and end of each window.
        knobs: by name, in the engine's order.
    """

    windows: list[tuple[int, int]]
    knobs: dict[str, PlannedKnob]


def preview(engine: Engine) -> Preview:
    """Open every window of a run that has not begun, with the levels that its designs draw, and train none.

    The engine is afterwards as it was before.

    Args:
        engine: before its first step.

    Raises:
        StepError: the run has begun.
        ConfigError: it has no end, or more than 100,000 windows.
    """
    cycle, total = engine.cycle, engine.plan.total_steps
    if cycle.step_count or cycle.tally.steps:
        raise StepError(f"a preview is of a run that has not begun; this one has made {cycle.step_count} steps")
    if total is None:
        raise ConfigError("a run without an end cannot be previewed; give the engine total_steps=, or a schedule")
    _require_few_windows(engine.plan.windows, total)
    stride = max(1, total // POINTS)
    planned = (PlannedKnob(knob.name, knob.evidence.kind, knob.controller.kind) for knob in engine.knobs)
    seen = Preview([], {knob.name: knob for knob in planned})
    before = [collector.state_dict() for collector in cycle.collectors]  # evidence may remember windows
    try:
        while cycle.step_count < total:
            window = cycle.open_window(len(seen.windows))
            seen.windows.append((window.start, window.stop))
            for step in sorted({*range(window.start, window.stop, stride), window.stop - 1}):
                for knob in engine.knobs:
                    _look(knob, step, engine.home.size, seen.knobs[knob.name])
            cycle.step_count = window.stop
    finally:
        cycle.step_count = 0
        cycle.open_window(0)
        for collector, state in zip(cycle.collectors, before, strict=True):
            collector.load_state_dict(state, None)
        cycle.reapply()
    return seen


def _require_few_windows(windows: Windows, total: int) -> None:
    step = 0
    for _ in range(MOST_WINDOWS):
        step += windows.at(step)
        if step >= total:
            return
    raise ConfigError(
        f"{total} steps have more than {MOST_WINDOWS} windows, too many to be shown; hdet run takes them, and to see "
        f"them planned give longer windows (window) or fewer steps"
    )


def _look(knob: BoundKnob, step: int, replicas: int, into: PlannedKnob) -> None:
    values = knob.values(step, range(replicas)) if knob.evidence.diverges else _compared(knob, step)
    into.steps.append(step)
    into.bases.append(knob.base(step))
    into.low.append(min(values))
    into.high.append(max(values))


def _compared(knob: BoundKnob, step: int) -> list[float]:
    """The values that evidence without diverging replicas compares: as far from the base as it looks."""
    width = knob.looked_at
    return [knob.displaced(step, offset) for offset in (-width, width)] if math.isfinite(width) else [knob.base(step)]
