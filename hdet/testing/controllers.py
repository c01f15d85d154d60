"""The laws of controllers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from hdet.controllers import Context, Controller, Estimate
from hdet.controllers.state import from_plain, to_plain
from hdet.errors import ConfigError
from hdet.testing.law import broken, require

WINDOWS = 12
SLOPES = (-3.0, -0.2, -1e-3, 0.0, 1e-3, 0.2, 3.0)
ERRORS = (1e-3, 0.1, 10.0)
CURVATURES = (None, -1.0, 0.0, 0.5)
EXTREMES = (-1e100, -1e-300, 1e-300, 1e100)


def _course() -> Iterator[Context]:
    """A run of twelve windows: a warm-up, a plateau, a decline to zero."""
    values = [min(1.0, (window + 1) / 4, (WINDOWS - window) / 4) for window in range(WINDOWS + 1)]
    for window in range(WINDOWS):
        now, following = values[window], values[window + 1]
        yield Context(
            base=now,
            schedule_now=now,
            schedule_next=following,
            step=10 * (window + 1),
            total_steps=10 * WINDOWS,
            window=window,
            windows_left=WINDOWS - 1 - window,
            authority=2.0,
            spread=0.3,
            warming=following > now,
        )


def _estimate(slope: float, stderr: float, curvature: float | None = None) -> Estimate:
    bare = Estimate(slope, curvature, stderr, None if curvature is None else stderr)
    return replace(bare, averaged=replace(bare, slope=0.5 * slope))


def _lessons() -> list[Estimate]:
    """Estimates that say something, sure and unsure, one for each window of the course in turn."""
    every = [_estimate(*given) for given in product(SLOPES, ERRORS, CURVATURES)]
    return [every[(5 * number) % len(every)] for number in range(3 * WINDOWS)]


def _states(controller: Controller) -> list[tuple[Any, Context]]:
    """The state before each window of the course, and that window's context."""
    state, shift = controller.start(), 0.0
    found = []
    for context, estimate in zip(_course(), _lessons(), strict=False):
        context = replace(context, shift=shift, base=context.schedule_now * math.exp(shift))
        found.append((state, context))
        move, state = _step(controller, state, estimate, context)
        shift = min(max(shift + move, -context.authority), context.authority)
    return found


def windows(controller: Controller) -> Iterator[tuple[Any, Estimate, Context]]:
    """The state before each window of the course, an estimate and the window's context."""
    for (state, context), estimate in zip(_states(controller), _lessons(), strict=False):
        yield state, estimate, context


def _step(controller: Controller, state: Any, estimate: Estimate, context: Context) -> tuple[float, Any]:
    answer = controller.step(state, estimate, context)
    require(isinstance(answer, tuple) and len(answer) == 2, f"step returned {answer!r}, not (move, state)")
    move, following = answer
    if not math.isfinite(move):
        broken(f"it moves by {move} after {estimate} in {context}")
    return float(move), following


def nothing_learnt_moves_nothing(controller: Controller) -> None:
    """After a window that taught nothing, or gave a NaN, the move is 0 and the state as it was."""
    silent = [
        Estimate.nothing(),
        Estimate(math.nan, None, 0.1),
        Estimate(math.nan, 1.0, math.nan),
        Estimate(0.3, None, math.nan),
        Estimate(math.inf, None, 1.0),
        Estimate(-math.inf, 1.0, math.inf),
    ]
    for state, context in _states(controller):
        before = to_plain(state)
        for estimate in silent:
            given = replace(estimate, averaged=estimate)
            move, following = controller.step(state, given, context)
            require(move == 0.0, f"it moves by {move} after {given} in {context}")
            require(
                to_plain(following) == before, f"its state went from {before} to {to_plain(following)} after {given}"
            )


def moves_are_finite(controller: Controller) -> None:
    """Every estimate that says something gives a finite move, however extreme it is."""
    extreme = [_estimate(slope, error, c) for slope in EXTREMES for error in (0.0, 1e-300, 1.0) for c in (None, 1e-300)]
    for state, context in _states(controller):
        for estimate in [*_lessons(), *extreme]:
            _step(controller, state, estimate, context)


def an_open_end_is_taken_or_refused(controller: Controller) -> None:
    """In a run without a known end it moves, or says by a ConfigError that it cannot."""
    state = controller.start()
    for context, estimate in zip(_course(), _lessons(), strict=False):
        try:
            _, state = _step(controller, state, estimate, replace(context, total_steps=None, windows_left=None))
        except ConfigError:
            return


def steps_depend_on_arguments_alone(controller: Controller) -> None:
    """The same state, estimate and context give the same move and state; the state given is left alone."""
    for state, estimate, context in windows(controller):
        before = json.dumps(to_plain(state))
        one, two = _step(controller, state, estimate, context), _step(controller, state, estimate, context)
        same = one[0] == two[0] and to_plain(one[1]) == to_plain(two[1])
        require(same, f"asked twice about {estimate} in {context} it answered {one} and {two}")
        require(json.dumps(to_plain(state)) == before, f"the state it was given, {before}, became {state}")


def state_is_plain_numbers(controller: Controller) -> None:
    """A state written as plain numbers and read back goes on as the state itself would."""
    for state, estimate, context in windows(controller):
        again = from_plain(state, json.loads(json.dumps(to_plain(state))))
        one, two = _step(controller, state, estimate, context), _step(controller, again, estimate, context)
        same = one[0] == two[0] and to_plain(one[1]) == to_plain(two[1])
        require(same, f"from {state} it answers {one}, and {two} once that was written and read")


LAWS = (
    nothing_learnt_moves_nothing,
    moves_are_finite,
    an_open_end_is_taken_or_refused,
    steps_depend_on_arguments_alone,
    state_is_plain_numbers,
)
