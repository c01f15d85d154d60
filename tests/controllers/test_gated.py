import math

import numpy as np
import pytest

from hdet.controllers import Context, Estimate, Gated, GatedState


def moves(gated: Gated, ts: list[float]) -> list[float]:
    state, out = gated.start(), []
    for t in ts:
        move, state = gated.step(state, Estimate(slope=t, stderr=1.0), Context())
        out.append(move)
    return out


def test_weight_decay_rule_by_hand() -> None:
    # u -= 0.5 clip(t / 4, +-1) if |t| > 1
    expected = [0, 0, -0.5 * 1.1 / 4, 0.25, -0.5, 0.5]
    assert moves(Gated(0.5), [0.5, -1.0, 1.1, -2.0, 4.0, -9.0]) == pytest.approx(expected)


def test_accumulating_rule_by_hand() -> None:
    # Z <- .7 Z + t, n <- .49 n + 1, u -= .06 clip(Z / sqrt n / 2, +-1), no gate.
    # t = 1, 1, -3: Z = 1, 1.7, -1.81; n = 1, 1.49, 1.7301.
    expected = [-0.03, -0.03 * 1.7 / math.sqrt(1.49), 0.03 * 1.81 / math.sqrt(1.7301)]
    assert moves(Gated(0.06, gate=0, saturation=2, memory=0.7), [1, 1, -3]) == pytest.approx(expected)


def test_weak_windows_add_up_only_with_memory() -> None:
    weak = [0.7] * 8
    assert not any(moves(Gated(), weak))
    assert moves(Gated(memory=0.7), weak)[-1] < 0


def test_accumulated_evidence_of_a_placebo_has_unit_variance() -> None:
    draw = np.random.default_rng(0)
    gated, state, taus = Gated(memory=0.7), GatedState(), []
    for t in draw.normal(size=4000):
        _, state = gated.step(state, Estimate(slope=float(t), stderr=1.0), Context())
        taus.append(state.total / math.sqrt(state.variance))
    assert np.std(taus) == pytest.approx(1, abs=0.05)


def test_one_window_without_error_does_not_rule_for_ever() -> None:
    gated = Gated(memory=0.7)
    _, state = gated.step(gated.start(), Estimate(slope=1.0, stderr=0.0), Context())
    for _ in range(20):
        move, state = gated.step(state, Estimate(slope=-3.0, stderr=1.0), Context())
    assert move > 0


def test_scale_of_the_slope_is_irrelevant() -> None:
    small = Gated().step(GatedState(), Estimate(slope=3e-6, stderr=1e-6), Context())
    large = Gated().step(GatedState(), Estimate(slope=3e6, stderr=1e6), Context())
    assert small[0] == pytest.approx(large[0])


def test_a_short_window_moves_by_its_share() -> None:
    gated, estimate = Gated(0.4, full=40), Estimate(slope=9.0, stderr=1.0)
    assert gated.step(gated.start(), estimate, Context(length=10))[0] == pytest.approx(-0.1)
    assert gated.step(gated.start(), estimate, Context(length=40))[0] == pytest.approx(-0.4)
    assert gated.step(gated.start(), estimate, Context(length=400))[0] == pytest.approx(-0.4)


def test_early_in_the_run_the_base_is_lowered_and_not_raised() -> None:
    gated = Gated(0.4, raise_after=0.3)
    raising, lowering = Estimate(slope=-9.0, stderr=1.0), Estimate(slope=9.0, stderr=1.0)
    early, later = Context(step=29, total_steps=100), Context(step=30, total_steps=100)
    assert gated.step(gated.start(), raising, early)[0] == 0
    assert gated.step(gated.start(), lowering, early)[0] == pytest.approx(-0.4)
    assert gated.step(gated.start(), raising, later)[0] == pytest.approx(0.4)
    assert gated.step(gated.start(), raising, Context(step=0))[0] == pytest.approx(0.4), "an open end has no share"
