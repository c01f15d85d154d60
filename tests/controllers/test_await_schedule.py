"""`AwaitSchedule`: a rate above the schedule as given does not rise with the warm-up as well."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hdet.controllers import Calibrate, Context, Estimate
from hdet.controllers.rules import AwaitSchedule
from hdet.controllers.rules.await_schedule import AwaitScheduleState

LESS = Estimate(slope=0.3, stderr=0.1, averaged=Estimate.nothing())
RISEN = AwaitScheduleState(risen_to=0.5, risen_from=0.4)
ABOVE = Context(warming=True, schedule_now=0.5, schedule_next=0.5, shift=0.6)
RISE = math.log(0.5 / 0.4)


def asked(estimate: Estimate = LESS, context: Context = ABOVE, state: AwaitScheduleState = RISEN) -> float | None:
    return AwaitSchedule().propose(state, estimate, context)


def test_the_rise_of_the_schedule_is_taken_back() -> None:
    assert asked() == pytest.approx(-RISE)


def test_no_further_than_to_the_schedule_as_given() -> None:
    assert asked(context=replace(ABOVE, shift=0.1)) == pytest.approx(-0.1)


@pytest.mark.parametrize(
    ("estimate", "context", "state"),
    [
        (replace(LESS, slope=0.19), ABOVE, RISEN),
        (replace(LESS, slope=-0.3), ABOVE, RISEN),
        (LESS, replace(ABOVE, shift=0.0), RISEN),
        (LESS, replace(ABOVE, shift=-0.6), RISEN),
        (LESS, replace(ABOVE, shift=1.2), RISEN),
        (LESS, replace(ABOVE, warming=False), RISEN),
        (LESS, replace(ABOVE, schedule_next=0.4), RISEN),
        (LESS, ABOVE, AwaitScheduleState(risen_to=0.5)),
    ],
)
def test_where_nothing_speaks_for_it_it_is_silent(
    estimate: Estimate, context: Context, state: AwaitScheduleState
) -> None:
    """No proof; not above the schedule, or far above it; the schedule has not risen, or nobody knows by how much."""
    assert asked(estimate, context, state) is None


@pytest.mark.parametrize(("size", "move"), [(2.0, -RISE), (1.1, -math.log(1.1)), (1.0, None), (0.1, None)])
def test_small_steps_of_an_untrained_model_go_on_rising(size: float, move: float | None) -> None:
    sized = replace(LESS, step_size=size)
    assert asked(sized, state=replace(RISEN, untrained=True)) == (move if move is None else pytest.approx(move))
    assert asked(sized) == pytest.approx(-RISE), "in fine-tuning small steps may do harm"


def test_a_base_that_calibrate_raised_stands_still_over_windows() -> None:
    """A schedule that doubles in four windows, and a base 1.5 times above it: met on the way, then followed."""
    calibrate, schedule = Calibrate(), [0.25 * 2 ** (window / 4) for window in range(6)]
    state, shift, bases, rules = calibrate.start(), math.log(1.5), [], []
    for window, now in enumerate(schedule[:-1]):
        context = replace(ABOVE, schedule_now=now, schedule_next=schedule[window + 1], shift=shift, window=window)
        judged = calibrate.judge(state, LESS, context)
        shift, state = shift + judged.move, judged.state
        bases.append(schedule[window + 1] * math.exp(shift))
        rules.append(judged.rule)
    first = 1.5 * schedule[1]  # the first window knows of no rise
    assert bases == pytest.approx([max(first, given) for given in schedule[1:]])
    assert rules == ["", *["await_schedule"] * 3, ""]


def test_a_rewind_and_a_new_start_forget_where_the_schedule_stood() -> None:
    rule = AwaitSchedule()
    assert rule.retreat(RISEN, ABOVE) == rule.restart(RISEN, ABOVE) == rule.start()
