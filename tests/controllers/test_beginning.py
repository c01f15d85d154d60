"""How far a rate is raised and lowered while a model warms up, untrained or pretrained."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from hdet import Rewind
from hdet.controllers import Calibrate, Context, Estimate
from hdet.controllers.beginning import SHORT_OF, Beginning, HarmlessState, OfBeginning, OfHarmlessSteps
from hdet.controllers.rules import CatchUp, CutBack, LookAhead, Raise, Regain, Return
from hdet.controllers.rules.catch_up import CatchUpState
from hdet.controllers.rules.returning import ReturnState
from hdet.controllers.vetoes import LargeSteps, SmallSteps

SMALL = 0.5
LESS = Estimate(slope=0.3, curvature=0.1, stderr=0.01, step_size=1.0)
AHEAD = replace(LESS, offset=0.7)
BEGUN = Beginning(untrained=True)
HARMLESS = HarmlessState(untrained=True)
RISING = Context(warming=True)


def allowed(
    move: float, estimate: Estimate = LESS, context: Context = RISING, state: HarmlessState = HARMLESS
) -> float:
    return SmallSteps(small=SMALL).allow(move, state, estimate, context)


def regained(size: float, shift: float, state: HarmlessState = HARMLESS, context: Context = RISING) -> float | None:
    estimate = replace(AHEAD, step_size=size)
    return Regain(small=SMALL).propose(state, estimate, replace(context, shift=shift))


@pytest.mark.parametrize(("size", "left"), [(4.0, -0.6), (0.6, math.log(0.5 / 0.6)), (0.5, 0.0), (0.01, 0.0)])
def test_a_rate_is_lowered_no_further_than_to_where_its_steps_are_small(size: float, left: float) -> None:
    assert allowed(-0.6, replace(LESS, step_size=size)) == pytest.approx(left)


def test_a_rate_that_was_raised_comes_back_to_what_was_given() -> None:
    small = replace(LESS, step_size=0.1)
    assert allowed(-0.6, small, replace(RISING, shift=0.2)) == pytest.approx(-0.2)
    assert allowed(-0.6, small, replace(RISING, shift=0.9)) == pytest.approx(-0.6)


def test_no_raise_is_held_back() -> None:
    assert allowed(0.6, replace(LESS, step_size=0.1)) == 0.6


SILENT = [
    (replace(LESS, step_size=None), RISING, HARMLESS),
    (LESS, RISING, HarmlessState()),
]


@pytest.mark.parametrize(("estimate", "context", "state"), SILENT)
def test_where_nothing_says_that_steps_are_harmless_none_speaks(
    estimate: Estimate, context: Context, state: HarmlessState
) -> None:
    """No size is known; the weights had been trained."""
    if estimate.step_size is not None:
        estimate = replace(estimate, step_size=0.1)
    assert allowed(-0.6, estimate, context, state) == -0.6
    ahead, lowered = replace(estimate, offset=0.7), replace(context, shift=-1.0)
    assert Regain(small=SMALL).propose(state, ahead, lowered) is None
    assert CatchUp().propose(CatchUpState(untrained=state.untrained), estimate, lowered) is None


@pytest.mark.parametrize(("size", "shift", "move"), [(0.1, -1.0, 1.0), (0.4, -1.0, math.log(0.5 / 0.4))])
def test_what_was_lowered_goes_back_up_at_once(size: float, shift: float, move: float) -> None:
    """As far as to what was given, or to where steps are no longer small."""
    assert regained(size, shift) == pytest.approx(move)


@pytest.mark.parametrize(("size", "shift"), [(0.5, -1.0), (2.0, -1.0), (0.1, 0.0), (0.1, 0.5)])
def test_nothing_is_to_be_regained(size: float, shift: float) -> None:
    assert regained(size, shift) is None


def test_a_raise_that_evidence_calls_for_is_left_to_looking_ahead() -> None:
    more = replace(AHEAD, slope=-0.3, step_size=0.49, excess=1.0)
    judged = Calibrate(small=SMALL).judge(Calibrate().start(), more, replace(RISING, shift=-1.0))
    assert (judged.move, judged.rule) == (0.6, "look_ahead")


@pytest.mark.parametrize(("slope", "move"), [(0.0, 1.0), (-0.19, 1.0), (-0.21, None)])
def test_it_needs_no_proof_that_less_is_called_for(slope: float, move: float | None) -> None:
    """Evidence that says nothing leaves the rate to be regained."""
    quiet = replace(AHEAD, slope=slope, stderr=0.1, step_size=0.01)
    assert Regain(small=SMALL).propose(HARMLESS, quiet, replace(RISING, shift=-1.0)) == move


def test_without_a_size_that_is_small_both_are_off() -> None:
    assert SmallSteps(small=0.0).allow(-0.6, HARMLESS, LESS, RISING) == -0.6
    assert Regain(small=0.0).propose(HARMLESS, AHEAD, replace(RISING, shift=-1.0)) is None


WRECK = replace(AHEAD, level=31.0, opening=3.0, step_size=0.1)
WRECKS = [
    (WRECK, True),
    (replace(WRECK, level=29.0), False),
    (replace(WRECK, opening=None), False),
    (replace(WRECK, opening=-3.0), False),
    (replace(WRECK, level=None), False),
    (replace(WRECK, level=math.inf), True),
    (replace(WRECK, stderr=0.2), False),
    (replace(WRECK, step_size=0.6), False),
    (replace(WRECK, step_size=None), False),
]


@pytest.mark.parametrize(("line", "wrecks"), WRECKS)
@pytest.mark.parametrize("part", [Regain(small=SMALL), SmallSteps(small=SMALL)])
def test_small_steps_that_a_line_has_shown_to_wreck_the_network_are_not_harmless(
    part: OfHarmlessSteps, line: Estimate, wrecks: bool
) -> None:
    """Not larger steps, nor a loss that is told by chance; what one window has shown holds for the later ones."""
    state = part.observe(part.observe(HARMLESS, line, RISING), replace(AHEAD, level=3.0), RISING)
    lowered = replace(RISING, shift=-1.0)
    assert (part.room(state, replace(AHEAD, step_size=0.1), lowered) is None) is wrecks
    assert part.restart(state, RISING).wreck is wrecks


def test_calibrate_lowers_a_rate_whose_small_steps_wreck_the_network() -> None:
    calibrate, lowered = Calibrate(small=SMALL), replace(RISING, shift=-1.4)
    first = replace(AHEAD, level=1e6, opening=3.0, excess=1.0, step_size=0.1)
    judged = calibrate.judge(calibrate.start(), first, lowered)
    assert (judged.move, judged.rule, judged.veto) == (-0.6, "look_ahead", "")
    judged = calibrate.judge(judged.state, replace(AHEAD, level=3.0, step_size=0.1), lowered)
    assert (judged.move, judged.rule, judged.veto) == (-0.6, "look_ahead", "")
    unharmed = Calibrate(small=SMALL, wrecked=1e7)
    assert unharmed.judge(unharmed.start(), first, lowered).rule == "regain"


PARTS = [CutBack(), Regain(), SmallSteps(), LargeSteps(), CatchUp(), LookAhead(), Raise()]


@pytest.mark.parametrize("part", PARTS)
def test_what_the_first_window_told_is_kept_and_a_rewind_ends_it(part: OfBeginning) -> None:
    """But for the veto on large steps: that they were too large is what a rewind says. A new start has them again."""
    begun = part.begin(part.start(), replace(LESS, excess=1.0))
    assert begun == replace(part.start(), untrained=True)
    assert part.observe(begun, LESS, RISING).untrained
    assert part.restart(begun, RISING) == begun
    assert part.restart(replace(begun, untrained=False, fell=True), RISING).fell, "the warm-up is over for good"
    assert part.retreat(begun, RISING).untrained == isinstance(part, LargeSteps)
    trained = part.begin(part.start(), replace(LESS, excess=1.3))
    assert trained == replace(part.start(), pretrained=True)
    assert part.restart(trained, RISING) == part.start(), "raises of a pretrained model have gone too far"
    assert part.begin(part.start(), replace(LESS, excess=0.0)) == part.start(), "no matrix tells"


@pytest.mark.parametrize("part", PARTS)
def test_a_schedule_that_has_fallen_ends_the_warm_up_for_good(part: OfBeginning) -> None:
    """A cycle with a warm-up of its own begins with weights that have been trained by then."""
    state = part.begin(part.start(), replace(LESS, excess=1.0))
    told = []
    for share in (0.5, 0.5, 1.0, 0.9, 0.2, 0.6, 1.0):
        state = part.observe(state, LESS, replace(RISING, schedule_next=share))
        told.append(state.untrained)
    assert told == [True] * 3 + [False] * 4


def test_a_first_window_whose_slope_nobody_knows_tells_of_the_weights_all_the_same() -> None:
    calibrate = Calibrate()
    unknown = replace(Estimate.nothing(), averaged=Estimate.nothing(), step_size=1.5, excess=1.0)
    begun = calibrate.judge(calibrate.start(), unknown, RISING)
    assert (begun.move, begun.rule) == (0.0, "")
    more = replace(AHEAD, slope=-0.3, step_size=1.5)
    judged = calibrate.judge(begun.state, more, RISING)
    assert (judged.move, judged.veto) == (pytest.approx(math.log(2.0 / 1.5)), "large_steps")


@pytest.mark.parametrize(
    ("size", "shift", "left"),
    [
        (7.0, -0.4, 0.4),
        (2.0, -1.7, 0.6),
        (9.0, 0.0, 0.0),
        (9.0, 0.5, 0.0),
        (8.1, -0.4, 0.0),
        (1.95, -1.9, math.log(2.0 / 1.95)),
        (1.5, -math.log(8.001), math.log(2.0 / 1.5)),
    ],
)
def test_the_schedule_as_given_is_within_reach_unless_its_steps_are_huge(
    size: float, shift: float, left: float
) -> None:
    more = replace(LESS, slope=-0.3, step_size=size)
    assert LargeSteps(huge=0.0).allow(0.1, BEGUN, more, replace(RISING, shift=-1.7)) == 0.1
    assert LargeSteps().allow(0.6, BEGUN, more, replace(RISING, shift=shift)) == pytest.approx(left)


@pytest.mark.parametrize(("size", "left"), [(0.5, 0.6), (1.5, math.log(2.0 / 1.5)), (2.0, 0.0), (9.0, 0.0)])
def test_a_rate_is_raised_no_further_than_to_where_its_steps_are_large(size: float, left: float) -> None:
    more = replace(LESS, slope=-0.3, step_size=size)
    assert LargeSteps().allow(0.6, BEGUN, more, RISING) == pytest.approx(left)
    assert LargeSteps().allow(-0.6, BEGUN, more, RISING) == -0.6
    assert LargeSteps(large=0.0).allow(0.6, BEGUN, more, RISING) == 0.6


@pytest.mark.parametrize(("estimate", "context", "state"), SILENT)
def test_where_steps_are_not_known_to_be_large_none_is_held_back(
    estimate: Estimate, context: Context, state: Beginning
) -> None:
    if estimate.step_size is not None:
        estimate = replace(estimate, step_size=100.0)
    assert LargeSteps().allow(0.6, state, estimate, context) == 0.6


def test_calibrate_raises_to_where_steps_are_large_and_later_as_evidence_asks() -> None:
    first = replace(AHEAD, slope=-0.3, excess=1.0, step_size=1.5)
    judged = Calibrate().judge(Calibrate().start(), first, RISING)
    assert (judged.move, judged.rule, judged.veto) == (pytest.approx(math.log(2.0 / 1.5)), "look_ahead", "large_steps")
    over = replace(first, excess=None, step_size=None, offset=0.0, averaged=Estimate(slope=0.0, stderr=0.1))
    assert Calibrate().judge(judged.state, over, replace(RISING, warming=False)).move > 0.29


def test_calibrate_enters_from_below_and_comes_back_where_steps_are_small() -> None:
    calibrate = Calibrate(small=SMALL)
    first = replace(AHEAD, excess=1.0, step_size=0.1)
    judged = calibrate.judge(calibrate.start(), first, replace(RISING, shift=-1.4))
    assert (judged.move, judged.rule) == (pytest.approx(1.4), "regain")
    judged = calibrate.judge(judged.state, replace(first, excess=None), RISING)
    assert (judged.move, judged.rule, judged.veto) == (0.0, "look_ahead", "small_steps")
    without = calibrate.without("regain", "small_steps")
    assert without.step(without.start(), first, RISING)[0] == -0.6


NOT_MISLED = CatchUpState(untrained=True)


@pytest.mark.parametrize(("size", "move"), [(0.03, 1.0), (0.15, math.log(2.0)), (0.3, None), (2.0, None)])
def test_steps_that_hardly_matter_are_made_larger(size: float, move: float | None) -> None:
    """As far as the rule's `too_small`, wherever the schedule as given lies."""
    estimate = replace(LESS, step_size=size)
    found = [CatchUp().propose(NOT_MISLED, estimate, replace(RISING, shift=shift)) for shift in (-1.0, 0.0, 2.0)]
    assert found == [pytest.approx(move)] * 3
    misled = replace(NOT_MISLED, misled=True)
    for state in (NOT_MISLED, misled):
        assert CatchUp(too_small=0.0).propose(state, estimate, RISING) is None
        assert CatchUp(ceiling=0.5).propose(state, estimate, replace(RISING, shift=0.5)) is None
    assert CatchUp(misled_to=0.1).propose(misled, estimate, RISING) == found[1], "never less far"


@pytest.mark.parametrize(
    ("size", "t", "reached"),
    [(0.012, 11.0, 0.5), (0.059, 11.0, 0.5), (0.06, 11.0, 0.3), (0.012, 3.9, 0.3), (0.012, -11.0, 0.3)],
)
def test_they_are_made_larger_still_where_evidence_calls_for_less_than_very_small_steps(
    size: float, t: float, reached: float
) -> None:
    """A GPT of 125 million parameters from a tenth of the rate: its first window, ahead of the base, says t = 11."""
    calibrate = Calibrate()
    first = Estimate(t / 100, stderr=0.01, level=3.0, step_size=size, offset=1.9, excess=1.0)
    state = calibrate.judge(calibrate.start(), first, RISING).state
    silent = Estimate(0.0, 0.1, 0.1, averaged=Estimate.nothing(), level=3.0)
    for window in range(4):
        judged = calibrate.judge(state, replace(silent, step_size=0.2), replace(RISING, shift=0.5, window=window))
        state = judged.state
    assert (judged.rule, judged.move) == ("catch_up", pytest.approx(math.log(reached / 0.2)))
    assert CatchUp().retreat(state.parts["catch_up"], RISING) == CatchUpState(), "a rewind forgets it"
    assert not CatchUp().observe(CatchUpState(pretrained=True), first, RISING).misled
    assert not CatchUp(tiny=0.0).observe(NOT_MISLED, first, RISING).misled


@pytest.mark.parametrize("t", [-1.0, 1.0, 9.0])
def test_they_need_no_proof_above_what_was_given(t: float) -> None:
    """Last weights call for less in most windows of a large model."""
    calibrate = Calibrate()
    tiny = Estimate(t / 10, 0.1, 0.1, averaged=Estimate.nothing(), level=3.0, step_size=0.03, excess=1.0)
    context = replace(RISING, shift=1.0, step=60, total_steps=3000)
    judged = calibrate.judge(calibrate.start(), tiny, context)
    assert (judged.move, judged.rule, judged.veto) == (1.0, "catch_up", "")
    assert calibrate.step(calibrate.start(), replace(tiny, excess=1.3), context)[0] == 0.0
    assert Calibrate(ceiling=0.0).step(calibrate.start(), tiny, context)[0] == 0.0


def test_evidence_for_more_or_less_comes_first() -> None:
    calibrate = Calibrate()
    more = replace(LESS, slope=-0.3, averaged=Estimate.nothing(), step_size=0.2, excess=1.0)
    assert calibrate.judge(calibrate.start(), more, RISING).rule == "raise"
    less = replace(LESS, averaged=Estimate(0.3, 0.1, 0.01), step_size=0.2, excess=1.0)
    judged = calibrate.judge(calibrate.start(), less, replace(RISING, shift=0.5))
    assert (judged.rule, judged.move < 0) == ("lower", True)


def test_what_evidence_has_lowered_is_not_raised_again() -> None:
    calibrate = Calibrate()
    less = replace(LESS, averaged=Estimate(0.3, 0.1, 0.01), step_size=0.2, excess=1.0)
    lowered = calibrate.judge(calibrate.start(), less, replace(RISING, shift=0.5)).state
    unsure = replace(LESS, averaged=Estimate.nothing(), step_size=0.1)
    assert calibrate.judge(lowered, unsure, RISING).move == 0.0
    assert CatchUp().moved(NOT_MISLED, -0.3, -0.3, replace(LESS, offset=0.7), RISING).untrained, (
        "looking ahead may have"
    )
    assert calibrate.judge(calibrate.start(), replace(unsure, excess=1.0), RISING).rule == "catch_up"


MORE = replace(LESS, slope=-0.3, curvature=3.0)  # a Newton move of 0.1
AT_BASE, BEFORE_IT = Raise(), LookAhead()


@pytest.mark.parametrize("rule", [AT_BASE, BEFORE_IT])
@pytest.mark.parametrize(("size", "move"), [(0.002, math.log(65.0)), (0.02, math.log(6.5)), (0.03, 0.1), (0.13, 0.1)])
def test_from_tiny_steps_a_raise_goes_at_once_to_where_they_are_not(
    rule: Raise | LookAhead, size: float, move: float
) -> None:
    more = replace(MORE, step_size=size)
    assert rule.propose(BEGUN, more, RISING) == pytest.approx(move)
    assert rule.replace(tiny=0.0).propose(BEGUN, more, RISING) == pytest.approx(0.1)
    assert rule.propose(Beginning(), more, RISING) == pytest.approx(0.1)
    assert rule.propose(BEGUN, replace(more, step_size=None), RISING) == pytest.approx(0.1)


def test_tiny_steps_alone_call_for_nothing() -> None:
    """Neither where the last weights call for less, nor where they prove nothing."""
    tiny = replace(MORE, step_size=0.01)
    unproved, less = replace(tiny, stderr=0.2), replace(tiny, slope=0.3)
    assert [AT_BASE.propose(BEGUN, each, RISING) for each in (unproved, less)] == [None, None]
    assert AT_BASE.propose(BEGUN, replace(tiny, slope=-0.2, stderr=0.1), RISING) is None, "t is -2, and not below"
    assert [BEFORE_IT.propose(BEGUN, each, RISING) for each in (unproved, less)] == [0.0, pytest.approx(-0.1)]


@pytest.mark.parametrize("rule", [AT_BASE, BEFORE_IT])
def test_it_goes_no_further_than_the_ceiling_and_shortens_no_raise(rule: Raise | LookAhead) -> None:
    tiny = replace(MORE, step_size=0.01)
    assert rule.replace(ceiling=0.5).propose(BEGUN, tiny, replace(RISING, shift=0.2)) == pytest.approx(0.3)
    wide = Raise(limit=4.0) if isinstance(rule, Raise) else LookAhead(early_limit=4.0)
    assert wide.propose(BEGUN, replace(tiny, curvature=None), RISING) == pytest.approx(4.0)


def test_without_a_raise_above_what_was_given_there_is_none_from_tiny_steps() -> None:
    calibrate = Calibrate(ceiling=0.0)
    tiny = replace(MORE, averaged=Estimate.nothing(), step_size=0.001, excess=1.0)
    assert calibrate.step(calibrate.start(), tiny, RISING)[0] == pytest.approx(0.1)


def test_calibrate_tells_its_rules_what_is_tiny() -> None:
    calibrate = Calibrate(tiny=0.02)
    first = replace(MORE, offset=0.7, excess=1.0, step_size=0.013)
    judged = calibrate.judge(calibrate.start(), first, replace(RISING, shift=-1.4))
    assert (judged.move, judged.rule) == (pytest.approx(math.log(10.0)), "look_ahead")
    later = replace(MORE, averaged=Estimate.nothing(), step_size=0.013)
    judged = calibrate.judge(judged.state, later, replace(RISING, shift=-1.4))
    assert (judged.move, judged.rule) == (pytest.approx(math.log(10.0)), "raise")
    judged = calibrate.judge(judged.state, replace(later, step_size=0.025), replace(RISING, shift=-1.4))
    assert (judged.move, judged.rule) == (pytest.approx(0.1), "raise")


TRAINED = Beginning(pretrained=True)


@pytest.mark.parametrize("rule", [AT_BASE, BEFORE_IT])
@pytest.mark.parametrize(("t", "times"), [(-2.1, 1.05), (-4.0, 2.0), (-8.0, 4.0), (-100.0, 5.0), (-math.inf, 5.0)])
def test_of_a_pretrained_model_a_raise_goes_the_further_the_more_certain_it_is(
    rule: Raise | LookAhead, t: float, times: float
) -> None:
    flat = Estimate(slope=-0.3, stderr=-0.3 / t)
    limit = rule.limit if isinstance(rule, Raise) else rule.early_limit
    furthest = min(times * limit, 2.5)
    assert rule.propose(TRAINED, flat, RISING) == pytest.approx(furthest)
    assert rule.propose(BEGUN, flat, RISING) == pytest.approx(limit), "untrained, the first windows call for too much"
    assert rule.propose(Beginning(), flat, RISING) == pytest.approx(limit), "nobody knows"
    assert rule.replace(furthest=0.0).propose(TRAINED, flat, RISING) == pytest.approx(limit)
    assert rule.propose(TRAINED, replace(flat, curvature=3.0), RISING) == pytest.approx(0.1), "a Newton move"


FIRST = Estimate(slope=-0.001, curvature=-0.0009, stderr=0.0001, excess=2.8, bottom=math.log(100.0))
"""Of a pretrained model's first window: a parabola in the rate with its bottom at 100 times the rate."""


@pytest.mark.parametrize("rule", [AT_BASE, BEFORE_IT])
def test_the_first_raise_of_a_pretrained_model_stops_short_of_the_bottom_of_a_parabola_in_the_rate(
    rule: Raise | LookAhead,
) -> None:
    def raised(estimate: Estimate, state: Beginning = TRAINED, *, of: Any = rule, shift: float = 0.0) -> float:
        move = of.propose(state, estimate, replace(RISING, shift=shift))
        assert move is not None
        return move

    assert raised(FIRST) == pytest.approx(math.log(100.0) - SHORT_OF)
    assert raised(replace(FIRST, bottom=2.5 + SHORT_OF - 0.1)) == pytest.approx(2.5), "as near as any raise goes"
    assert raised(replace(FIRST, bottom=None)) == pytest.approx(2.5), "no bottom is proven"
    assert raised(replace(FIRST, excess=None)) == pytest.approx(2.5), "a later window"
    limit = rule.limit if isinstance(rule, Raise) else rule.early_limit
    assert raised(FIRST, of=rule.replace(furthest=0.0)) == pytest.approx(limit)
    assert raised(replace(FIRST, excess=1.0), Beginning(untrained=True)) == pytest.approx(limit)
    assert raised(FIRST, shift=2.0) == pytest.approx(3.0), "no further than the ceiling"


def test_and_where_it_calls_for_less_or_proves_nothing_the_parabola_has_no_say() -> None:
    less = replace(FIRST, slope=0.001, curvature=0.002)
    assert BEFORE_IT.propose(TRAINED, less, RISING) == pytest.approx(-0.5)
    assert AT_BASE.propose(TRAINED, replace(FIRST, stderr=0.001), RISING) is None
    assert BEFORE_IT.propose(TRAINED, replace(FIRST, stderr=0.001), RISING) == 0.0


def test_and_a_lowering_no_further_than_any() -> None:
    less = Estimate(slope=0.3, stderr=0.01)
    assert BEFORE_IT.propose(TRAINED, less, RISING) == pytest.approx(-BEFORE_IT.early_limit)


def test_calibrate_raises_a_pretrained_models_rate_at_once_until_the_schedule_falls() -> None:
    calibrate = Calibrate()
    more = replace(LESS, slope=-0.3, curvature=None, stderr=0.05, averaged=Estimate.nothing())
    first = replace(more, offset=0.7, excess=1.5)
    judged = calibrate.judge(calibrate.start(), first, replace(RISING, schedule_next=0.4))
    assert judged.move == pytest.approx(1.8)
    later = calibrate.judge(judged.state, more, replace(RISING, schedule_next=0.5))
    assert later.move == pytest.approx(1.5)
    fallen = calibrate.judge(later.state, more, Context(schedule_next=0.4))
    assert fallen.move == pytest.approx(0.5)


def returned(
    size: float | None, t: float, *, averaged: float = 0.0, untrained: bool = True, small: float = SMALL
) -> float | None:
    called = Estimate(slope=0.1 * averaged, stderr=0.1)
    estimate = Estimate(slope=0.1 * t, stderr=0.1, step_size=size, averaged=called)
    return Return(small=small).propose(ReturnState(untrained=untrained), estimate, replace(RISING, shift=-1.0))


@pytest.mark.parametrize(("size", "move"), [(0.1, 0.25), (0.45, math.log(0.5 / 0.45)), (0.5, None), (2.0, None)])
def test_what_looking_ahead_lowered_returns_to_where_steps_are_small(size: float, move: float | None) -> None:
    """And beyond where t at the last weights is below 0; that averaged ones call for more is not enough there."""
    assert [returned(size, t) for t in (0.0, 1.0)] == [pytest.approx(move)] * 2
    assert returned(size, 30.0, averaged=-4.0) == pytest.approx(move)
    assert returned(size, -0.01) == 0.25
    assert returned(size, 1.0, small=0.0) == 0.25, "switched off"


@pytest.mark.parametrize(("size", "untrained"), [(None, True), (2.0, False)])
def test_where_steps_are_not_known_to_be_small_it_returns_as_far_as_to_what_was_given(
    size: float | None, untrained: bool
) -> None:
    assert returned(size, 1.0, untrained=untrained) == 0.25
    assert returned(size, 30.0, averaged=-4.0, untrained=untrained) == 0.25


def test_a_pretrained_model_that_nothing_has_lowered_is_hardly_held_by_last_weights() -> None:
    """Unless averaged weights call for less. Later, and once looking ahead has lowered it, the last ones hold it."""
    rule, given = Return(), replace(RISING, shift=-1.0)
    state = rule.observe(rule.begin(rule.start(), replace(LESS, excess=99.0)), LESS, given)
    averaged = [Estimate(slope=0.1 * t, stderr=0.1) for t in (1.9, 2.1)]
    less = [replace(LESS, slope=1.0, stderr=0.1, offset=0.0, averaged=own) for own in averaged]
    assert [rule.propose(state, estimate, given) for estimate in less] == [0.25, None]
    assert rule.propose(replace(state, pretrained=False), less[0], given) is None, "the warm-up is over, or untrained"
    lowered = rule.moved(state, -0.1, -0.1, replace(LESS, offset=0.7), given)
    assert lowered == replace(state, looked=True)
    assert rule.moved(lowered, 0.25, 0.25, LESS, given) == lowered, "for good"
    for ahead, move in product((LESS, AHEAD), (0.0, 0.25)):
        assert rule.moved(state, move, move, ahead, given) == state, "a raise lowers nothing"
    assert rule.propose(lowered, less[0], given) is None
    off = Return(entered_significance=2.0)
    assert off.propose(state, less[0], given) is None
    assert off.propose(state, replace(less[1], slope=0.1), given) == 0.25, "as of any other model"


def test_what_evidence_lowers_of_a_pretrained_model_stays() -> None:
    """Its last weights call for less at any rate, so that a return would be held by averaged ones alone."""
    rule, below = Return(), replace(RISING, shift=-1.0)
    first = replace(AHEAD, excess=99.0, bottom=2.0)
    state = rule.observe(rule.begin(rule.start(), first), first, below)
    state = rule.moved(state, -0.5, -0.5, LESS, below)
    for _ in range(5):
        state = rule.observe(state, replace(LESS, slope=0.0), below)
        assert rule.propose(state, replace(LESS, slope=0.0), below) is None


def test_a_pretrained_model_goes_on_to_where_its_first_window_proved_the_rate_to_be_best() -> None:
    """By moves of 0.25, as long as the warm-up lasts, and after looking ahead has lowered it, too."""
    rule, given = Return(), replace(RISING, shift=-1.0)
    first = replace(AHEAD, excess=99.0, bottom=2.0)  # taken at 0.7 above a base that lies 1 below what was given
    state = rule.observe(rule.begin(rule.start(), first), first, given)
    assert state.goal == pytest.approx(1.7)
    less = replace(LESS, slope=1.0)
    at = [replace(RISING, shift=shift) for shift in (0.3, 1.6, 1.7)]
    assert [rule.propose(state, less, context) for context in at] == [0.25, pytest.approx(0.1), None]
    assert rule.propose(replace(state, looked=True), less, at[0]) == 0.25
    assert rule.propose(replace(state, looked=True, goal=0.5), less, at[0]) == pytest.approx(0.2)
    assert rule.propose(replace(state, looked=True, goal=0.0), less, given) is None, "nothing was proved"
    assert rule.propose(replace(state, waits=1.0), less, at[0]) is None
    later = replace(less, bottom=9.0)  # those of later windows are not for the whole run
    assert rule.observe(state, later, at[0]).goal == state.goal
    fallen = rule.observe(state, less, Context(shift=0.3, schedule_next=-1.0))
    assert rule.propose(fallen, replace(less, slope=0.0), at[0]) is None
    assert Return(ceiling=0.0).observe(state, first, given).goal == 0.0, "switched off"
    below = rule.observe(state, replace(first, bottom=-9.0), given)
    assert below.goal == 0.0, "a rate as given is not doubted by a parabola"
    untrained = replace(first, excess=1.0)
    assert rule.observe(rule.begin(rule.start(), untrained), untrained, given).goal == 0.0


def test_a_schedule_of_huge_steps_is_returned_to_as_far_as_steps_are_known_to_be_small() -> None:
    state, below = ReturnState(untrained=True, huge=True), replace(RISING, shift=-1.0)
    small = Estimate(slope=0.1, stderr=0.1, step_size=0.1)
    assert Return(small=SMALL).propose(state, small, below) == 0.25
    assert Return(small=SMALL).propose(state, replace(small, step_size=None), below) is None


def test_a_return_remembers_where_the_run_begins_anew() -> None:
    rule, state = Return(), ReturnState(untrained=True, waits=2.0)
    assert rule.restart(state, RISING) == state
    assert rule.moved(replace(state, waits=0.0), -0.6, -0.6, LESS, RISING) == state
    assert rule.moved(state, 0.25, 0.25, LESS, RISING) == state, "what was lowered stays so"
    assert rule.begin(rule.start(), replace(LESS, excess=1.0)) == ReturnState(untrained=True)


def cut(size: float | None, t: float = 0.0, state: Beginning = BEGUN, **options: float) -> float | None:
    return CutBack(**options).propose(state, Estimate(slope=0.1 * t, stderr=0.1, step_size=size, offset=0.7), RISING)


@pytest.mark.parametrize(("size", "t"), [(12.1, 0.0), (24.0, -1.9), (300.0, 30.0)])
def test_a_rate_of_huge_steps_is_cut_back_at_once(size: float, t: float) -> None:
    """By so much that a guard begins anew (`Rewind.overshoot`), whether evidence calls for less or says nothing."""
    move = cut(size, t)
    assert move == pytest.approx(math.log(3.0 / size))
    assert move < -math.log(Rewind().overshoot or math.inf)


def test_what_is_not_known_to_be_huge_or_asked_to_grow_is_not_cut_back() -> None:
    assert [cut(size) for size in (None, 0.0, 4.0, 12.0)] == [None] * 4
    assert cut(24.0, -2.1) is None, "evidence calls for more"
    assert cut(24.0, state=Beginning(pretrained=True)) is None
    assert cut(24.0, huge=0.0) is None, "switched off"
    assert cut(24.0, state=Beginning()) is None, "nobody knows of the first weights"
    assert cut(24.0, huge=1.0, cut_to=30.0) is None, "no raise, and other rules have their say"


def test_calibrate_cuts_back_before_it_looks_ahead_and_only_while_it_does() -> None:
    calibrate = Calibrate()
    first = replace(AHEAD, excess=1.0, step_size=24.0)
    judged = calibrate.judge(calibrate.start(), first, RISING)
    assert (judged.move, judged.rule) == (pytest.approx(math.log(3.0 / 24.0)), "cut_back")
    later = replace(first, excess=None, offset=0.0, averaged=Estimate(slope=0.0, stderr=0.1))
    assert calibrate.judge(judged.state, later, RISING).rule != "cut_back"
    assert Calibrate(huge=0.0).judge(calibrate.start(), first, RISING).rule == "look_ahead"


def test_a_new_start_goes_on_below_large_steps() -> None:
    """It neither returns to where steps are not small nor is raised to where they are large."""
    calibrate, given = Calibrate(), replace(RISING, shift=-math.log(20.0))
    judged = calibrate.judge(calibrate.start(), replace(AHEAD, excess=1.0, step_size=40.0), replace(RISING, shift=0.0))
    move, state = calibrate.restart(judged.state, given)
    assert move < 0.0
    nothing = Estimate(slope=0.0, stderr=0.1, step_size=2.0, averaged=Estimate(slope=0.0, stderr=0.1))
    assert calibrate.judge(state, nothing, given).move == 0.0
    more = replace(nothing, slope=-1.0, step_size=1.95)
    judged = calibrate.judge(state, more, given)
    assert (judged.move, judged.veto) == (pytest.approx(math.log(2.0 / 1.95)), "large_steps")


@pytest.mark.parametrize(("size", "shift", "move"), [(12.1, 0.0, None), (3.0, -1.4, None), (3.0, -1.38, 0.25)])
def test_a_schedule_whose_steps_were_huge_is_not_returned_to_once_the_warm_up_is_over(
    size: float, shift: float, move: float | None
) -> None:
    rule, given = Return(), replace(RISING, shift=shift, schedule_next=0.5)
    state = rule.observe(ReturnState(untrained=True), Estimate(slope=0.0, stderr=0.1, step_size=size), given)
    over = replace(RISING, shift=-1.0, schedule_next=0.4)
    nothing = Estimate(slope=0.0, stderr=0.1)
    state = rule.observe(rule.restart(state, given), nothing, over)
    assert rule.propose(state, nothing, over) == move
    without = Return(huge=0.0).observe(ReturnState(untrained=True), replace(nothing, step_size=size), given)
    assert not without.huge
    assert not rule.observe(ReturnState(), replace(nothing, step_size=99.0), given).huge, "nobody knows of the weights"
