"""How a schedule falls follows how far the model overfits."""

from __future__ import annotations

import math

import pytest

from hdet.controllers import Calibrate, Context, Estimate
from hdet.controllers.gap import GapState
from hdet.controllers.rules import Fall

FALLING = {"schedule_now": 1.0, "schedule_next": 0.9, "total_steps": 100, "step": 40}


def power(gaps: list[float | None], fall: Fall | None = None, **context: float) -> float | None:
    """What the rule says after windows with these gaps, as shares of a held-out loss of 2."""
    fall = fall or Fall()
    state, place = fall.start(), FALLING | context
    assert gaps
    for gap in gaps:
        estimate = Estimate(slope=0.0, stderr=0.1, level=2.0)
        where = Context(loss=None if gap is None else 2.0 * (1.0 - gap), **place)  # type: ignore[arg-type]
        state = fall.observe(state, estimate, where)
    return fall.power(state, estimate, where)


@pytest.mark.parametrize(
    ("gap", "expected"), [(-0.5, 0.75), (0.0, 0.75), (0.1, 0.95), (0.2, 1.15), (0.24, 1.23)], ids=str
)
def test_the_power_grows_with_the_gap(gap: float, expected: float) -> None:
    assert power([gap]) == pytest.approx(expected)


def test_the_power_has_an_end() -> None:
    assert power([0.1] + [0.9] * 9) == 1.5
    assert power([0.1] + [0.9] * 9, Fall(most=2.0)) == 2.0


def test_the_gap_is_a_mean_over_windows() -> None:
    one, three = (power([0.0, *[0.2] * count], Fall(most=2.0)) for count in (1, 3))
    assert one is not None
    assert three is not None
    assert 0.75 < one < three < 1.15


def test_it_says_nothing_before_the_fall_or_without_an_end_or_a_loss() -> None:
    assert power([0.0], schedule_next=1.0) is None
    assert power([0.0], schedule_next=1.1) is None
    assert power([None]) is None
    endless = Context(schedule_now=1.0, schedule_next=0.9, loss=1.0)
    assert Fall().power(GapState(weight=1.0), Estimate(slope=0.0, stderr=0.1), endless) is None


@pytest.mark.parametrize("gap", [0.0, 0.24])
def test_once_decay_has_moved_the_fall_goes_on_as_given(gap: float) -> None:
    assert power([gap], decay_shift=0.41) == 1.0
    assert power([gap], decay_shift=0.39) == power([gap]) != 1.0
    assert power([None], decay_shift=0.41) is None
    assert power([gap], Fall(most_decay_shift=1.0), decay_shift=0.41) == power([gap])


def test_losses_on_two_scales_leave_the_fall_as_given() -> None:
    assert power([0.5, 0.5, 0.5]) == 1.0


@pytest.mark.parametrize(("level", "loss"), [(-1.0, -1.5), (0.1, -0.1), (0.0, 0.0), (-0.1, 0.1)])
def test_a_window_whose_losses_have_no_share_does_not_count(level: float, loss: float) -> None:
    """As densities' log-likelihoods, which cross 0."""
    fall, context = Fall(), Context(loss=loss, **FALLING)  # type: ignore[arg-type]
    assert fall.observe(fall.start(), Estimate(slope=0.0, stderr=0.1, level=level), context) == fall.start()


def test_what_was_read_ahead_of_the_base_tells_of_the_losses_scale_alone() -> None:
    fall, context = Fall(), Context(loss=1.0, **FALLING)  # type: ignore[arg-type]
    for level, other_scale in ((2.0, True), (1.2, False)):
        state = fall.start()
        for _ in range(3):
            state = fall.observe(state, Estimate(slope=0.0, stderr=0.1, level=level, offset=0.5), context)
        assert state == GapState(told=3, other_scale=other_scale)


def test_after_a_rewind_the_mean_begins_anew_and_the_scale_is_remembered() -> None:
    state = GapState(mean=0.4, weight=2.0, told=3, other_scale=True)
    assert Fall().retreat(state, Context()) == GapState(told=3, other_scale=True)


def test_it_asks_for_no_move_and_its_power_goes_with_anothers() -> None:
    calibrate = Calibrate()
    bent = calibrate.replace(rules=(*calibrate.rules, Fall()))
    raising = Estimate(slope=-0.3, stderr=0.1, level=2.0, averaged=Estimate.nothing())
    context = Context(loss=2.0, **FALLING)  # type: ignore[arg-type]
    plain, judged = (rule.judge(rule.start(), raising, context) for rule in (calibrate, bent))
    assert (judged.move, judged.rule) == (plain.move, "raise")
    assert (plain.power, judged.power) == (None, 0.75)
    unknown = bent.judge(bent.start(), Estimate.nothing(), context)
    assert unknown.power is None


@pytest.mark.parametrize(("level", "offset"), [(None, 0.0), (math.inf, 0.0), (math.inf, 0.7), (math.nan, 0.7)])
def test_a_window_without_a_held_out_loss_keeps_what_those_before_have_told(level: float | None, offset: float) -> None:
    fall, known = Fall(), GapState(mean=0.1, weight=1.0, told=1)
    estimate = Estimate(slope=0.0, stderr=0.1, level=level, offset=offset)
    assert fall.observe(known, estimate, Context(loss=1.0)) == known
