"""The rule for many learning rates: what all share moves as one would, and each takes its place among the others."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from windows import moves

from hdet.controllers import Calibrate, Context, Estimate, Hold, Pooled
from hdet.errors import ConfigError

AT_LAST = Estimate(slope=-0.3, stderr=0.1, curvature=1.0, averaged=Estimate(slope=0.1, stderr=0.1))
NOTHING = Estimate(slope=0.0, stderr=0.1, averaged=Estimate.nothing())
HALFWAY = Context(step=50, total_steps=100)
RANDOM, TRAINED = 1.0, 2.0
"""Spectral norms of first weights (`Estimate.excess`)."""


def first(log_ratio: float, common: Estimate = NOTHING, excess: float = RANDOM) -> Estimate:
    """A first window's: the group's steps go e^log_ratio times as far as the mean of all."""
    return replace(common, excess=excess, step_ratio=math.exp(log_ratio))


@pytest.mark.parametrize("estimate", [AT_LAST, NOTHING, replace(AT_LAST, offset=0.5)])
@pytest.mark.parametrize("ratio", [None, 1.0])
def test_without_a_place_of_its_own_to_go_to_it_is_the_common_rule(estimate: Estimate, ratio: float | None) -> None:
    windows = [(replace(estimate, excess=RANDOM, step_ratio=ratio), HALFWAY)] + 2 * [(estimate, HALFWAY)]
    assert moves(Pooled(), *windows) == moves(Calibrate(), *windows)


@pytest.mark.parametrize(("far", "wanted"), [(1.0, -0.6), (-1.0, 0.6), (9.0, -2.0), (-9.0, 2.0), (0.4, 0.0)])
def test_a_group_that_steps_too_far_or_not_far_enough_goes_to_the_edge_of_the_band(far: float, wanted: float) -> None:
    pooled = Pooled(common=Hold(), band=0.4, limit=2.0)
    assert moves(pooled, (first(far), HALFWAY)) == [pytest.approx(wanted)]


@pytest.mark.parametrize(("band", "left"), [(0.0, 0.0), (0.5, 0.5), (10.0, 1.3)])
def test_a_band_can_be_as_wide_as_one_likes(band: float, left: float) -> None:
    (move,) = moves(Pooled(common=Hold(), band=band), (first(1.3), HALFWAY))
    assert 1.3 + move == pytest.approx(left)


def test_a_trained_model_keeps_its_ratios() -> None:
    """Discriminative rates of fine-tuning are somebody's decision."""
    assert moves(Pooled(common=Hold()), (first(3.0, excess=TRAINED), HALFWAY), (first(3.0, excess=0.0), HALFWAY)) == [
        0.0,
        0.0,
    ]


def test_an_untrained_model_is_balanced_whenever_groups_are_compared() -> None:
    later = replace(NOTHING, step_ratio=math.exp(-0.4))
    pooled, moved = Pooled(common=Hold()), replace(HALFWAY, shift=-1.0)
    assert moves(pooled, (first(1.0), HALFWAY), (NOTHING, moved), (later, moved)) == pytest.approx([-1.0, 0.0, 0.4])
    assert moves(pooled, (first(0.0), HALFWAY), (later, HALFWAY)) == pytest.approx([0.0, 0.4])  # a group in its place
    assert moves(pooled, (first(1.0, excess=TRAINED), HALFWAY), (later, HALFWAY)) == [0.0, 0.0]


def test_a_group_that_was_never_compared_by_its_steps_goes_by_its_rate() -> None:
    """Once it was, that it has stopped to move is no reason to leave its place."""
    by_rate = replace(NOTHING, rate_ratio=math.exp(0.7))
    pooled, moved = Pooled(common=Hold()), replace(HALFWAY, shift=-0.7)
    assert moves(pooled, (replace(by_rate, excess=RANDOM), HALFWAY), (by_rate, moved)) == pytest.approx([-0.7, -0.7])
    assert moves(pooled, (first(0.7), HALFWAY), (by_rate, moved)) == pytest.approx([-0.7, 0.0])


def test_both_parts_add_up_and_the_common_rule_sees_its_own_alone() -> None:
    """A cap on the common part is not used up by what a group has of its own."""
    pooled, alone = Pooled(), Calibrate()
    state, common = pooled.start(), alone.start()
    shift = alone_shift = 0.0
    for window in range(6):
        told = first(2.0, AT_LAST) if window == 0 else AT_LAST
        move, state = pooled.step(state, told, replace(HALFWAY, shift=shift))
        wanted, common = alone.step(common, told, replace(HALFWAY, shift=alone_shift))
        shift, alone_shift = shift + move, alone_shift + wanted
        assert state.common["rule"] == common
        assert shift - state.relative == pytest.approx(alone_shift)
    assert state.relative == pytest.approx(-2.0)


def test_the_reason_is_that_of_the_larger_part() -> None:
    pooled = Pooled()
    assert pooled.judge(pooled.start(), first(1e-15), HALFWAY).rule == ""
    judged = pooled.judge(pooled.start(), first(2.0, AT_LAST), HALFWAY)
    assert (judged.rule, judged.veto, judged.alone) == ("balance", "", -2.0)
    assert pooled.judge(pooled.start(), first(0.2, AT_LAST), HALFWAY).rule == "raise"


def test_what_bounds_cut_off_a_move_is_no_part_of_the_group() -> None:
    """A bound lies 0.1 below: the group is as far as it got."""
    pooled = Pooled(common=Hold())
    _, state = pooled.step(pooled.start(), first(1.0), HALFWAY)
    stopped = replace(HALFWAY, shift=-0.1)
    _, placed = pooled.step(state, NOTHING, stopped)
    assert placed.relative == pytest.approx(-0.1)
    assert pooled.step(placed, NOTHING, stopped)[1].relative == placed.relative
    _, free = pooled.step(state, NOTHING, replace(HALFWAY, shift=state.relative))
    assert free.relative == pytest.approx(-1.0)


def test_what_bounds_cut_off_the_common_move_leaves_the_groups_own() -> None:
    pooled = Pooled()
    move, state = pooled.step(pooled.start(), first(0.5, AT_LAST), HALFWAY)
    shared = move - state.relative
    assert shared > 0.0 > state.relative
    _, after = pooled.step(state, NOTHING, replace(HALFWAY, shift=move - 0.1))
    assert after.relative == pytest.approx(state.relative)


def test_nothing_is_heard_after_the_common_rule_has_stopped_listening() -> None:
    late = replace(HALFWAY, step=90)
    assert moves(Pooled(), (first(2.0), late)) == [0.0]


def test_a_point_that_is_older_than_the_groups_place_is_of_the_common_part_alone() -> None:
    pooled = Pooled()
    state = pooled.step(pooled.start(), first(1.0), replace(HALFWAY, shift=0.4))[1]
    context = replace(HALFWAY, shift=state.relative + 0.4, point=50)
    move, after = pooled.retreat(state, context, worked=0.9)
    assert move == pytest.approx(Calibrate().retreat(Calibrate().start(), replace(HALFWAY, shift=0.4), worked=0.9)[0])
    assert after.relative == state.relative


def test_a_point_between_two_moves_of_a_group_held_the_first_alone() -> None:
    pooled, later = Pooled(common=Hold()), replace(NOTHING, step_ratio=math.exp(-0.4))
    state = pooled.step(pooled.start(), first(1.0), replace(HALFWAY, step=10))[1]
    state = pooled.step(state, later, replace(HALFWAY, step=20, shift=-1.0))[1]
    held = [state.relative_at(point) for point in (10, 11, 20, 21, None)]
    assert held == pytest.approx([0.0, -1.0, -1.0, -0.6, -0.6])


def test_after_a_turn_the_group_keeps_its_place_among_the_others() -> None:
    """After a rewind the common part goes below what worked for it."""
    pooled = Pooled()
    state = pooled.step(pooled.start(), first(1.0), replace(HALFWAY, shift=0.4))[1]
    context = replace(HALFWAY, shift=state.relative + 0.4)
    move, after = pooled.retreat(state, context, worked=math.exp(state.relative) * 0.9)
    wanted, _ = Calibrate().retreat(Calibrate().start(), replace(HALFWAY, shift=0.4), worked=0.9)
    assert move == pytest.approx(wanted)
    assert after.relative == pytest.approx(state.relative)
    assert pooled.retreat(state, replace(context, point=51), worked=math.exp(state.relative) * 0.9)[0] == move
    move, after = pooled.restart(state, context)
    assert move == Calibrate().restart(Calibrate().start(), context)[0]
    assert after.relative == pytest.approx(state.relative)


def test_what_bounds_cut_off_before_a_turn_is_no_part_of_the_group() -> None:
    """A bound lies 0.1 below as the run goes back: the rest of the shift is the common part's."""
    pooled, context = Pooled(), replace(HALFWAY, shift=-0.1)
    state = pooled.step(pooled.start(), first(1.0), HALFWAY)[1]
    for _, after in (pooled.retreat(state, context, worked=1.0), pooled.restart(state, context)):
        assert after.relative == pytest.approx(-0.1)
        assert pooled.step(after, NOTHING, replace(context, shift=-0.5))[1].relative == after.relative


def test_a_turn_is_one_of_the_common_rules_state_too() -> None:
    pooled, alone = Pooled(), Calibrate()
    state = pooled.step(pooled.start(), replace(AT_LAST, excess=RANDOM), replace(HALFWAY, loss=1.0))[1]
    common, later = state.common["rule"], replace(HALFWAY, step=60)
    turned = pooled.retreat(state, later, worked=0.9)[1].common["rule"]
    assert turned == alone.retreat(common, later, worked=0.9)[1] != common
    begun = pooled.restart(state, later)[1].common["rule"]
    assert begun == alone.restart(common, later)[1] not in (common, turned)


@pytest.mark.parametrize(
    ("far", "place", "wanted"),
    [
        (0.9, 0.0, -1.0),  # the nearest multiple, beyond what was asked
        (0.6, 0.0, -0.5),
        (0.1, 0.0, 0.0),
        (0.6, 0.1, -0.6),  # from a place that bounds have cut: to -0.5
        (-9.0, 0.4, 1.6),  # to 2.0, since 2.5 is further than the limit
        (0.075, 0.26, 0.0),  # a little less was asked, and the nearest multiple would be more
        (9.0, -0.4, -1.6),  # to -2.0
        (-2.07, 0.0, 2.0),  # exactly the limit
        (0.05, 0.4, 0.0),  # within the band nothing is asked, and nothing is rounded
    ],
)
def test_a_group_on_a_grid_goes_to_a_multiple_within_reach(far: float, place: float, wanted: float) -> None:
    pooled = Pooled(common=Hold(), band=0.07, limit=2.0, grid=0.5)
    state = replace(pooled.start(), untrained=True, measured=True, steps=(0,), places=(place,))
    estimate = replace(NOTHING, step_ratio=math.exp(far))
    move, after = pooled.step(state, estimate, replace(HALFWAY, shift=place))
    assert move == pytest.approx(wanted)
    assert after.relative == pytest.approx(place + wanted)


def test_a_grid_that_no_move_could_reach_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"grid=0\.5 is more than limit=0\.3"):
        Pooled(grid=0.5, limit=0.3)
