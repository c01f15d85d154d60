"""The rule for many learning rates: what all share moves as one would, and each by what it proves of itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from windows import moves

from hdet.controllers import Calibrate, Context, Estimate, Hold, Pooled

AT_LAST = Estimate(slope=-0.3, stderr=0.1, curvature=1.0, averaged=Estimate(slope=0.1, stderr=0.1))
NOTHING = Estimate(slope=0.0, stderr=0.1, averaged=Estimate.nothing())
HALFWAY = Context(step=50, total_steps=100)


def relative(slopes: Sequence[float], curvature: float = 1.0, common: Estimate = NOTHING) -> Estimate:
    error = float(np.std(slopes, ddof=1)) / math.sqrt(len(slopes))
    own = Estimate(float(np.mean(slopes)), curvature, error, slopes=tuple(slopes))
    return replace(common, relative=own)


SURE = (0.19, 0.2, 0.21, 0.2)


@pytest.mark.parametrize("estimate", [AT_LAST, NOTHING, replace(AT_LAST, offset=0.5)])
def test_without_anything_of_its_own_it_is_the_common_rule(estimate: Estimate) -> None:
    windows = [(replace(estimate, relative=one), HALFWAY) for one in (None, Estimate.nothing(), None)]
    assert moves(Pooled(), *windows) == moves(Calibrate(), *windows)


def test_both_parts_add_up_and_the_common_rule_sees_its_own_alone() -> None:
    """A cap on the common part is not used up by what a group has of its own."""
    pooled, alone = Pooled(), Calibrate()
    state, common = pooled.start(), alone.start()
    shift = alone_shift = 0.0
    for _ in range(6):
        move, state = pooled.step(state, relative(SURE, common=AT_LAST), replace(HALFWAY, shift=shift))
        wanted, common = alone.step(common, AT_LAST, replace(HALFWAY, shift=alone_shift))
        shift, alone_shift = shift + move, alone_shift + wanted
        assert state.common["rule"] == common
        assert shift - state.relative == pytest.approx(alone_shift)
    assert state.relative < -0.1


def test_a_sure_group_goes_to_the_bottom_of_its_parabola_and_stays() -> None:
    """slope = curvature (shift - best): what was answered counts no more."""
    pooled = Pooled(common=Hold())
    state, shift = pooled.start(), 0.0
    for _ in range(20):
        noisy = relative([shift - 1.0 + noise for noise in (-0.01, 0.01, 0.0)])
        move, state = pooled.step(state, noisy, replace(HALFWAY, shift=shift))
        assert abs(move) <= pooled.limit
        shift += move
    assert shift == pytest.approx(1.0, abs=0.03)
    assert shift == pytest.approx(state.relative)


def test_what_a_move_answered_is_not_asked_for_again() -> None:
    """But for what shrinking left of it."""
    pooled = Pooled(common=Hold(), limit=10.0)
    _, state = pooled.step(pooled.start(), relative(SURE), HALFWAY)
    left = 0.2 + state.relative
    there = replace(HALFWAY, shift=state.relative)
    move, _ = pooled.step(state, relative([slope + state.relative for slope in SURE]), there)
    assert 0.0 < -move < left < 0.05


def test_what_is_not_proved_moves_nothing() -> None:
    """Chance alone: a group without effect stays, mostly, and never goes far."""
    rng = np.random.default_rng(0)
    ends = []
    for _ in range(200):
        pooled = Pooled(common=Hold())
        state = pooled.start()
        for _ in range(20):
            noise = relative(rng.normal(0.0, 0.2, size=8) + state.relative)
            _, state = pooled.step(state, noise, replace(HALFWAY, shift=state.relative))
        ends.append(state.relative)
    assert np.median(np.abs(ends)) == 0.0
    assert np.abs(ends).max() < 0.3


def test_no_group_goes_beyond_its_reach() -> None:
    pooled = Pooled(common=Hold(), reach=0.5)
    state, shift = pooled.start(), 0.0
    for _ in range(9):
        move, state = pooled.step(state, relative(SURE), replace(HALFWAY, shift=shift))
        shift += move
    assert shift == pytest.approx(-0.5)
    assert move == 0.0


def test_what_bounds_cut_off_a_move_is_no_part_of_the_group_nor_answered() -> None:
    """A bound lies 0.1 below: the group is as far as it got, and asks for the rest again."""
    pooled = Pooled(common=Hold(), limit=10.0)
    _, state = pooled.step(pooled.start(), relative(SURE), HALFWAY)
    assert state.relative < -0.15
    stopped = replace(HALFWAY, shift=-0.1)
    _, placed = pooled.step(state, NOTHING, stopped)
    assert placed.relative == pytest.approx(-0.1)
    assert placed.slopes == pytest.approx([slope - 0.1 for slope in SURE])
    assert pooled.step(placed, NOTHING, stopped)[1] == placed
    _, free = pooled.step(state, NOTHING, replace(HALFWAY, shift=state.relative))
    assert free.relative == pytest.approx(state.relative)


def test_what_bounds_cut_off_the_common_move_leaves_the_groups_own() -> None:
    pooled = Pooled()
    move, state = pooled.step(pooled.start(), relative(SURE, common=AT_LAST), HALFWAY)
    shared = move - state.relative
    assert shared > 0.0 > state.relative
    _, after = pooled.step(state, NOTHING, replace(HALFWAY, shift=move - 0.1))
    assert after.relative == pytest.approx(state.relative)


def test_nothing_is_heard_after_the_common_rule_has_stopped_listening() -> None:
    late = replace(HALFWAY, step=90)
    assert moves(Pooled(), (relative(SURE), late)) == [0.0]


def test_another_number_of_sub_batches_begins_the_sums_anew() -> None:
    pooled = Pooled(common=Hold(), limit=10.0)
    many = moves(pooled, (relative([0.01, -0.01] * 4, curvature=50.0), HALFWAY), (relative(SURE), HALFWAY))
    assert many[1] == moves(pooled, (relative(SURE), HALFWAY))[0]


def test_after_a_rewind_the_group_keeps_its_place_among_the_others() -> None:
    """The common part goes below what worked for it; and what had added up is forgotten."""
    pooled = Pooled()
    state = pooled.step(pooled.start(), relative(SURE), replace(HALFWAY, shift=0.4))[1]
    context = replace(HALFWAY, shift=state.relative + 0.4)
    move, after = pooled.retreat(state, context, worked=math.exp(state.relative) * 0.9)
    wanted, _ = Calibrate().retreat(Calibrate().start(), replace(HALFWAY, shift=0.4), worked=0.9)
    assert move == pytest.approx(wanted)
    assert (after.relative, after.slopes, after.curvature) == (pytest.approx(state.relative), (), 0.0)
    move, after = pooled.restart(state, context)
    assert move == Calibrate().restart(Calibrate().start(), context)[0]
    assert (after.relative, after.slopes) == (pytest.approx(state.relative), ())
