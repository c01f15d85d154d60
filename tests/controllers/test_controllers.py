"""What every controller does, besides the laws of `hdet.testing`, which tests/test_conformance.py puts it to."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdet.contrib import Adam, Fade
from hdet.controllers import (
    Calibrate,
    Context,
    Controller,
    Estimate,
    Gated,
    HeavyBall,
    Hold,
    Newton,
    Paper,
    Pooled,
    Regularize,
    Ruled,
    from_plain,
    to_plain,
)
from hdet.controllers.controller import settled
from hdet.errors import ConfigError
from hdet.spec import members

CONTROLLERS = [
    Hold(),
    Adam(),
    Gated(),
    Gated(0.06, gate=0, saturation=2, memory=0.7),
    Regularize(rate=0.6, memory=0.6, raise_after=0.0),
    HeavyBall(),
    Paper(1e-3),
    Newton(),
    Newton(0.3, settle=0.2),
    Calibrate(),
    Ruled(),
    Pooled(),
]
every_controller = pytest.mark.parametrize("controller", CONTROLLERS, ids=lambda each: each.kind)
CONTEXT = Context(
    base=1.2, windows_left=5, shift=0.2, authority=2.0, spread=0.5, step=100, total_steps=1000, window=3, loss=0.9
)


def sure(slope: float, curvature: float | None = None) -> Estimate:
    """An estimate, agreeing at last and averaged weights, that no gate could doubt."""
    averaged = Estimate(slope, curvature, stderr=abs(slope) / 50)
    return Estimate(slope, curvature, stderr=abs(slope) / 50, averaged=averaged, level=1.0, span=1.0)


def test_every_member_is_tested() -> None:
    own = {member for member in members(Controller).values() if member.__module__.startswith("hdet.")}
    assert {type(each) for each in CONTROLLERS} >= own


@every_controller
@given(slope=st.floats(0.01, 1), downhill=st.sampled_from([-1, 1]), curvature=st.none() | st.floats(-1, 1))
@settings(max_examples=30)
def test_a_sure_slope_is_followed_downhill(
    controller: Controller, slope: float, downhill: int, curvature: float | None
) -> None:
    # (Paper decays on top; a floor at the base takes that away.)
    if isinstance(controller, Paper):
        controller = Paper(CONTEXT.base)
    move, _ = controller.step(controller.start(), sure(-downhill * slope, curvature), CONTEXT)
    if isinstance(controller, Hold) or controller == Ruled():
        assert move == 0
    else:
        assert move * downhill > 0


@every_controller
@given(
    slope=st.floats(-1e100, 1e100),
    stderr=st.floats(0, allow_infinity=True),
    curvature=st.none() | st.floats(allow_nan=True),
    shift=st.floats(-2, 2),
    step=st.integers(0, 1000),
    warming=st.booleans(),
)
@settings(max_examples=60)
def test_moves_and_states_stay_finite(
    controller: Controller, slope: float, stderr: float, curvature: float | None, shift: float, step: int, warming: bool
) -> None:
    estimate = Estimate(slope, curvature, stderr, averaged=Estimate(-slope / 2, curvature, stderr))
    context = Context(
        windows_left=5, shift=shift, authority=2.0, spread=0.5, step=step, total_steps=1000, warming=warming
    )
    state = controller.start()
    for _ in range(3):
        move, state = controller.step(state, estimate, context)
        assert math.isfinite(move)
        assert "NaN" not in json.dumps(to_plain(state))


@every_controller
@pytest.mark.parametrize("worked", [0.0, 0.3, 1.2, 50.0])
def test_after_a_rewind_it_goes_on_with_a_state_of_its_own(controller: Controller, worked: float) -> None:
    """What was gathered is forgotten, the base is not raised, and the state serves as any other."""
    _, state = controller.step(controller.start(), sure(0.2, 1.0), CONTEXT)
    move, back = controller.retreat(state, CONTEXT, worked)
    assert math.isfinite(move)
    assert move <= 0.0
    assert from_plain(back, to_plain(back)) == back
    if not isinstance(controller, (Ruled, Pooled)):
        assert (move, back) == (0.0, controller.start())
    following, _ = controller.step(back, sure(-0.1, 1.0), CONTEXT)
    assert math.isfinite(following)


@every_controller
def test_after_a_new_start_it_goes_on_with_a_state_of_its_own(controller: Controller) -> None:
    """What was gathered is forgotten, and the base is kept; only a rate is approached from below."""
    _, state = controller.step(controller.start(), sure(0.2, 1.0), CONTEXT)
    move, back = controller.restart(state, CONTEXT)
    assert from_plain(back, to_plain(back)) == back
    if isinstance(controller, (Calibrate, Pooled)):
        assert move == -math.log(Calibrate().retreat_factor)
    else:
        assert (move, back) == (0.0, controller.start())
    following, _ = controller.step(back, sure(-0.1, 1.0), CONTEXT)
    assert math.isfinite(following)


@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        (Gated, {"rate": -1}, "rate"),
        (Gated, {"memory": 1.0}, "memory"),
        (Gated, {"window_steps": 0}, "window_steps"),
        (Gated, {"until": 0.0}, "until"),
        (Regularize, {"min_harm": -1e-3}, "min_harm"),
        (Regularize, {"min_effect": -1e-3}, "min_effect"),
        (Regularize, {"max_gap": -0.1}, "max_gap"),
        (Regularize, {"max_extrapolation": 0.0}, "max_extrapolation"),
        (Calibrate, {"stall_ratio": 1.0}, "stall_ratio"),
        (Calibrate, {"return_step": -0.1}, "return_step"),
        (Calibrate, {"retreat_factor": 0.5}, "retreat_factor"),
        (HeavyBall, {"beta": 1.0}, "beta"),
        (Paper, {}, "floor"),
        (Newton, {"limit": 0}, "limit"),
        (Calibrate, {"patience": 0}, "patience"),
        (Calibrate, {"patients": 2}, "patients"),
    ],
)
def test_fields_are_bounded(kind: type[Controller], fields: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        kind(**fields)


def test_settling_by_hand() -> None:
    # The last fifth of 100 steps: untouched until 80, half at 90, nothing from 100 on.
    moves = [settled(1.0, 0.2, Context(step=step, total_steps=100)) for step in (0, 80, 90, 100, 110)]
    assert moves == pytest.approx([1, 1, 0.5, 0, 0])
    assert settled(1.0, 0.2, Context(step=90)) == 1.0
    assert settled(1.0, 0.0, Context(step=100, total_steps=100)) == 1.0


@pytest.mark.parametrize("controller", [Gated(settle=0.5), Newton(settle=0.5), Calibrate(vetoes=[Fade(0.5)])])
def test_controllers_that_settle(controller: Controller) -> None:
    full, _ = controller.step(controller.start(), sure(-0.1, 1.0), Context(spread=0.5))
    half, _ = controller.step(controller.start(), sure(-0.1, 1.0), Context(spread=0.5, step=75, total_steps=100))
    assert full > 0
    assert half == pytest.approx(full / 2)


def test_fraction_of_the_schedule() -> None:
    assert Context(schedule_now=0.2, peak=0.8).fraction == pytest.approx(0.25)
    assert Context(schedule_now=0.0, peak=0.0).fraction == 1.0
