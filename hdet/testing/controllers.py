"""The laws of controllers."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from hdet.controllers import Controller, Estimate
from hdet.controllers.state import from_plain, to_plain
from hdet.errors import ConfigError
from hdet.testing.course import LESSONS, contexts, course, estimate, step
from hdet.testing.law import require

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
