"""The laws of controllers."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from hdet.controllers import Context, Controller, Estimate
from hdet.controllers.state import from_plain, to_plain
from hdet.errors import ConfigError
from hdet.testing.course import LESSONS, contexts, course, estimate, step
from hdet.testing.law import BreachError, broken, require

EXTREMES = (-1e100, -1e-300, 1e-300, 1e100)
SILENT = (
    Estimate.nothing(),
    Estimate(math.nan, None, 0.1),
    Estimate(math.nan, 1.0, math.nan),
    Estimate(0.3, None, math.nan),
    Estimate(math.inf, None, 1.0),
    Estimate(-math.inf, 1.0, math.inf),
)


def nothing_learnt_moves_nothing(controller: Controller) -> None:
    """After a window that taught nothing, or gave a NaN, the move is 0 and the state as it was."""
    for state, _, context in course(controller):
        before = to_plain(state)
        for silent in SILENT:
            given = replace(silent, averaged=silent)
            move, following = controller.step(state, given, context)
            require(move == 0.0, f"it moves by {move} after {given} in {context}")
            after = to_plain(following)
            require(after == before, f"its state went from {before} to {after} after {given}")


def moves_are_finite(controller: Controller) -> None:
    """Every estimate that says something gives a finite move, however extreme it is."""
    extreme = [estimate(slope, error, c) for slope in EXTREMES for error in (0.0, 1e-300, 1.0) for c in (None, 1e-300)]
    for state, _, context in course(controller):
        for given in [*LESSONS, *extreme]:
            step(controller, state, given, context)


def evidence_may_tell_less_or_more(controller: Controller) -> None:
    """Without a judgement at averaged weights (unless it `needs_averaged`), in a first window, and of a value ahead."""
    for state, lesson, context in course(controller):
        told = [replace(lesson, excess=0.9, own_excess=0.9), replace(lesson, excess=5.0, own_excess=0.9)]
        told += [replace(lesson, offset=0.5)]
        told += [] if controller.needs_averaged else [replace(lesson, averaged=None)]
        for given in told:
            try:
                to_plain(step(controller, state, given, context)[1])
            except BreachError:
                raise
            except Exception as error:
                broken(f"after {given} in {context} it raised {type(error).__name__} ({error})")


def going_back_is_taken(controller: Controller) -> None:
    """After the run went back, or began anew, the move is finite and the state one that the controller goes on from."""
    for state, lesson, context in course(controller):
        kept = json.dumps(to_plain(state))
        for worked in (0.5 * context.base, context.base):
            _goes_on(controller, controller.retreat(state, context, worked), "retreat", lesson, context)
        _goes_on(controller, controller.restart(state, context), "restart", lesson, context)
        require(json.dumps(to_plain(state)) == kept, f"the state it was given, {kept}, became {state}")


def _goes_on(controller: Controller, answer: object, method: str, lesson: Estimate, context: Context) -> None:
    pair = answer if isinstance(answer, tuple) and len(answer) == 2 else None
    if pair is None:
        broken(f"{method} returned {answer!r}, not (move, state)")
    require(math.isfinite(pair[0]), f"{method} moves by {pair[0]} in {context}")
    step(controller, from_plain(controller.start(), json.loads(json.dumps(to_plain(pair[1])))), lesson, context)


def an_open_end_is_taken_or_refused(controller: Controller) -> None:
    """In a run without a known end it moves, or says by a ConfigError that it cannot."""
    state = controller.start()
    for context, lesson in zip(contexts(), LESSONS, strict=False):
        try:
            _, state = step(controller, state, lesson, replace(context, total_steps=None, windows_left=None))
        except ConfigError:
            return


def steps_depend_on_arguments_alone(controller: Controller) -> None:
    """The same state, estimate and context give the same move and state; the state given is left alone."""
    for state, lesson, context in course(controller):
        before = json.dumps(to_plain(state))
        one, two = step(controller, state, lesson, context), step(controller, state, lesson, context)
        same = one[0] == two[0] and to_plain(one[1]) == to_plain(two[1])
        require(same, f"asked twice about {lesson} in {context} it answered {one} and {two}")
        require(json.dumps(to_plain(state)) == before, f"the state it was given, {before}, became {state}")


def state_is_plain_numbers(controller: Controller) -> None:
    """A state written as plain numbers and read back goes on as the state itself would."""
    for state, lesson, context in course(controller):
        again = from_plain(state, json.loads(json.dumps(to_plain(state))))
        one, two = step(controller, state, lesson, context), step(controller, again, lesson, context)
        same = one[0] == two[0] and to_plain(one[1]) == to_plain(two[1])
        require(same, f"from {state} it answers {one}, and {two} once that was written and read")
