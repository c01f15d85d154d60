import math
from dataclasses import replace

import pytest

from hdet.controllers import Calibrate, CalibrateState, Context, Estimate
from hdet.errors import ConfigError


def bracket(t_last: float, t_avg: float, n_last: float = 0.0, n_avg: float = 0.0) -> Estimate:
    """An estimate with the given t-statistics and, where the signs allow, Newton moves (0: too far)."""

    def one(t: float, n: float, averaged: Estimate | None = None) -> Estimate:
        return Estimate(0.1 * t, -0.1 * t / n if n else None, stderr=0.1, averaged=averaged)

    return one(t_last, n_last, one(t_avg, n_avg))


UP, DOWN = bracket(-3, 0, n_last=0.2), bracket(0, 4, n_avg=-0.2)
LOW, LATE = Context(schedule_now=0.3, warming=True), Context(schedule_now=0.3, warming=False)


def move(estimate: Estimate, context: Context = LATE) -> float:
    return Calibrate().step(CalibrateState(), estimate, context)[0]


def test_raise() -> None:
    assert move(UP) == pytest.approx(0.2)
    assert move(bracket(-3, 0)) == 0.5, "no positive curvature: the limit"
    assert move(bracket(-3, 0, n_last=4)) == 0.5
    assert move(bracket(-3, -9, n_last=0.2)) == pytest.approx(0.2)


@pytest.mark.parametrize("t_last", [-2.0, -1.0, 0.0, 3.0])
def test_no_raise_without_proof(t_last: float) -> None:
    assert move(bracket(t_last, 0)) == 0


def test_no_raise_early_in_the_warm_up() -> None:
    assert move(UP, LOW) == 0
    assert move(UP, Context(schedule_now=0.35, warming=True)) == pytest.approx(0.2)
    assert move(UP, Context(schedule_now=0.7, peak=2.0, warming=True)) == pytest.approx(0.2)


def test_lower() -> None:
    assert move(DOWN) == pytest.approx(-0.2)
    assert move(DOWN, LOW) == pytest.approx(-0.2), "also in the warm-up"
    assert move(bracket(0, 4)) == -0.5
    assert move(bracket(0, 2.9)) == 0


def test_a_raise_that_the_averaged_weights_contradict_is_a_lowering() -> None:
    assert move(bracket(-3, 4, n_last=0.2, n_avg=-0.1)) == pytest.approx(-0.1)


def test_the_last_iterate_alone_never_lowers() -> None:
    assert move(bracket(50, 1)) == 0


def test_cap_by_hand() -> None:
    # Two warnings in a row at s = 0.4: the peak may be 2 times the present value, so
    # mu_max = mu + log(2 * 0.4) = mu - 0.2231, and mu is brought down to it at once.
    calibrate, context = Calibrate(headroom=2.0), Context(schedule_now=0.4, shift=1.0, warming=True)
    first, state = calibrate.step(calibrate.start(), bracket(3, 0), context)
    assert (first, state) == (0, CalibrateState(math.inf, 1))
    second, state = calibrate.step(state, bracket(3, 0), context)
    assert second == pytest.approx(math.log(0.8))
    assert state.cap == pytest.approx(1.0 + math.log(0.8))


def test_the_cap_needs_consecutive_warm_up_windows() -> None:
    calibrate, warm = Calibrate(), Context(schedule_now=0.4, warming=True)
    state = calibrate.start()
    for estimate, context in [
        (bracket(3, 0), warm),
        (bracket(1, 0), warm),
        (bracket(3, 0), warm),
        (bracket(3, 0), LATE),
        (bracket(3, 0), LATE),
    ]:
        moved, state = calibrate.step(state, estimate, context)
        assert moved == 0
    assert state.cap == math.inf


def test_the_cap_is_set_once_and_then_limits_every_raise() -> None:
    calibrate, state = Calibrate(), CalibrateState(cap=0.1)
    context = Context(schedule_now=0.4, warming=True)
    for _ in range(3):
        _, state = calibrate.step(state, bracket(3, 0), context)
    assert state.cap == 0.1
    moved, state = calibrate.step(state, UP, LATE)
    assert moved == pytest.approx(0.1)
    moved, _ = calibrate.step(state, DOWN, LATE)
    assert moved == pytest.approx(-0.2)


def test_a_late_cap_leaves_headroom() -> None:
    # At s = 0.9 the cap lies above: mu may still grow by log(1.8).
    calibrate, context = Calibrate(headroom=2.0), Context(schedule_now=0.9, warming=True)
    moved, state = calibrate.step(CalibrateState(warnings=1), bracket(3, 0), context)
    assert moved == 0
    assert state.cap == pytest.approx(math.log(1.8))


def test_settling_does_not_fade_the_cap() -> None:
    calibrate = Calibrate(settle=1.0, headroom=2.0, until=1.0)
    end = Context(schedule_now=0.4, warming=True, step=99, total_steps=100)
    moved, _ = calibrate.step(CalibrateState(warnings=1), bracket(3, 0), end)
    assert moved == pytest.approx(math.log(0.8))


def test_evidence_without_averaged_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="window-averaged weights"):
        Calibrate().step(CalibrateState(), Estimate(slope=1.0, stderr=1.0), LATE)


def test_constants_are_fields() -> None:
    timid = Calibrate(significance=4, lower_significance=4, limit=0.1, trusted_from=0.2, patience=1, headroom=1.0)
    assert timid.step(timid.start(), UP, LATE)[0] == 0
    assert timid.step(timid.start(), bracket(-5, 3), LOW)[0] == 0.1
    _, state = timid.step(timid.start(), bracket(5, 0), LOW)
    assert state.cap == pytest.approx(math.log(0.3))


def ahead(t_last: float, n_last: float | None = None) -> Estimate:
    return replace(bracket(t_last, 50, n_last=n_last), offset=0.7)


def test_looking_ahead_moves_either_way_on_the_last_iterate_alone() -> None:
    low = Context(schedule_now=0.1, shift=-2.0, warming=True)
    assert move(ahead(-3, 0.2), low) == pytest.approx(0.2)
    assert move(ahead(3, -0.2), low) == pytest.approx(-0.2)
    assert move(ahead(-3), low) == 0.6, "no positive curvature: the early limit"
    assert move(ahead(2), low) == 0


def test_looking_ahead_raises_to_the_ceiling_only_and_lowers_from_above_it() -> None:
    assert move(ahead(-3), Context(schedule_now=0.1, shift=-0.25, warming=True)) == 0.25
    assert move(ahead(-3), Context(schedule_now=0.1, shift=0.5, warming=True)) == 0
    assert move(ahead(3), Context(schedule_now=0.1, shift=0.5, warming=True)) == -0.6


def test_looking_ahead_leaves_the_count_towards_the_cap_alone() -> None:
    _, state = Calibrate().step(CalibrateState(warnings=1), ahead(9), Context(schedule_now=0.1, warming=True))
    assert state == CalibrateState(warnings=1)


def test_late_in_the_run_it_neither_listens_nor_moves() -> None:
    late = Context(schedule_now=0.3, step=85, total_steps=100)
    assert not Calibrate().listens(85, 100)
    assert Calibrate().listens(84, 100)
    assert Calibrate().listens(85, None)
    assert move(UP, late) == 0
