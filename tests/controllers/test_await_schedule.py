"""`AwaitSchedule`: a rate above the schedule as given does not rise with the warm-up as well."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from hdet.controllers import Calibrate, Context, Estimate
from hdet.controllers.rules import AwaitSchedule
from hdet.controllers.rules.await_schedule import AwaitScheduleState

LESS = Estimate(slope=0.3, stderr=0.1, averaged=Estimate.nothing())
RISE = math.log(0.5 / 0.4)
RISEN = AwaitScheduleState(last=0.5, rise=RISE)
ABOVE = Context(schedule_now=0.5, schedule_next=0.5, shift=0.6)


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
        (LESS, ABOVE, replace(RISEN, rise=0.0)),
        (LESS, ABOVE, replace(RISEN, fell=True)),
        (LESS, ABOVE, replace(RISEN, pretrained=True)),
    ],
)
def test_where_nothing_speaks_for_it_it_is_silent(
    estimate: Estimate, context: Context, state: AwaitScheduleState
) -> None:
    """No proof; not above the schedule, or far above it; it has not risen, or has fallen before; of trained weights."""
    assert asked(estimate, context, state) is None


@pytest.mark.parametrize(("size", "move"), [(2.0, -RISE), (1.1, -math.log(1.1)), (1.0, None), (0.1, None)])
def test_small_steps_of_an_untrained_model_go_on_rising(size: float, move: float | None) -> None:
    sized = replace(LESS, step_size=size)
    assert asked(sized, state=replace(RISEN, untrained=True)) == (move if move is None else pytest.approx(move))
    assert asked(sized) == pytest.approx(-RISE), "nobody knows of untrained weights"
    without = AwaitSchedule(small=0.0).propose(replace(RISEN, untrained=True), sized, ABOVE)
    assert without == pytest.approx(-RISE), "no steps are small"


def course(schedule: list[float], shift: float) -> tuple[list[float], list[str]]:
    """The bases at which windows begin, and the rules that spoke, where the last weights always call for less."""
    calibrate, bases, rules = Calibrate(), [], []
    state = calibrate.start()
    for window, (now, following) in enumerate(pairwise(schedule)):
        context = Context(schedule_now=now, schedule_next=following, shift=shift, window=window)
        judged = calibrate.judge(state, LESS, context)
        shift, state = shift + judged.move, judged.state
        bases.append(following * math.exp(shift))
        rules.append(judged.rule)
    return bases, rules


def test_a_base_that_calibrate_raised_waits_until_the_schedule_has_come_up() -> None:
    """A schedule that doubles in four windows, and a base 1.5 times above it."""
    schedule = [0.25 * 2 ** (window / 4) for window in range(6)]
    bases, rules = course(schedule, math.log(1.5))
    first = 1.5 * schedule[1]  # the first window knows of no rise
    assert bases == pytest.approx([max(first, given) for given in schedule[1:]])
    assert rules == ["", *["await_schedule"] * 3, ""]


def test_a_warm_up_by_stairs_is_one() -> None:
    bases, _ = course([0.2, 0.2, 0.4, 0.4, 0.6, 0.6], math.log(2.0))
    assert bases == pytest.approx([0.4, 0.4, 0.4, 0.6, 0.6])


def test_what_a_course_that_nobody_knew_rises_by_is_taken_back() -> None:
    """Its peak is what it has come to; while that rises, nobody knows it. What was raised at 0.1 was proved there."""
    rule = AwaitSchedule()
    state, shift, shifts = rule.start(), 1.5, []
    more = replace(LESS, slope=-0.3)
    for peak in (math.inf, 0.1, 0.1, 0.3, 0.3, math.inf, 0.5):
        context = Context(schedule_now=min(peak, 0.4), schedule_next=min(peak, 0.4), peak=peak, shift=shift)
        state = rule.observe(state, more, context)
        move = rule.propose(state, more, context) or 0.0
        state, shift = rule.moved(state, move, move, more, context), shift + move
        shifts.append(shift)
    assert shifts == pytest.approx([1.5, 1.5, 1.5, *[1.5 - math.log(3.0)] * 3, 0.0])


def test_it_is_owed_where_another_rule_spoke_first() -> None:
    rule, context = AwaitSchedule(), replace(ABOVE, peak=1.0, shift=1.0)
    state = rule.observe(AwaitScheduleState(peak=0.5), LESS, context)
    assert state.owed == pytest.approx(math.log(2.0))
    state = rule.moved(state, -0.5, -0.5, LESS, context)
    later = replace(context, shift=0.5)
    assert rule.propose(rule.observe(state, LESS, later), LESS, later) == pytest.approx(0.5 - math.log(2.0))
    below = replace(context, shift=-0.5)
    assert rule.observe(state, LESS, below).owed == 0.0, "nothing is above the schedule"


@pytest.mark.parametrize("again", [[0.4, 0.8, 1.0], [1.0, 1.0]])
def test_a_schedule_that_rises_again_is_no_warm_up(again: list[float]) -> None:
    """A cycle, or a cosine's restart: what was found by then stays."""
    bases, _ = course([1.0, 1.0, 0.6, 0.2, *again], math.log(2.0))
    assert bases == pytest.approx([2.0 * given for given in [1.0, 0.6, 0.2, *again]])


def test_a_rewind_forgets_where_the_schedule_stood() -> None:
    """A new start does not: the schedule goes on."""
    rule = AwaitSchedule()
    assert rule.retreat(RISEN, ABOVE) == rule.start()
    assert rule.restart(RISEN, ABOVE) == RISEN


@pytest.mark.parametrize(("size", "move"), [(3.0, -math.log(1.5)), (None, -RISE)], ids=str)
def test_what_small_steps_are_is_a_number_and_without_a_size_nobody_knows(size: float | None, move: float) -> None:
    risen = replace(RISEN, untrained=True, rise=0.5 if size else RISE)
    assert AwaitSchedule(small=2.0).propose(risen, replace(LESS, step_size=size), ABOVE) == pytest.approx(move)


def test_a_larger_move_of_another_rule_leaves_no_credit() -> None:
    """What the schedule rises by later is owed in full."""
    rule, still = AwaitSchedule(), Context(peak=0.5, shift=1.0)
    state = rule.moved(replace(RISEN, peak=0.5, owed=0.2), -0.7, -0.7, LESS, still)
    assert rule.observe(state, LESS, replace(still, peak=1.0)).owed == pytest.approx(math.log(2.0))
