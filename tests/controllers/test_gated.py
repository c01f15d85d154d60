import math
from dataclasses import replace

import numpy as np
import pytest
from windows import moves

from hdet.controllers import Context, Estimate, Gated, GatedState


def moves_at(gated: Gated, ts: list[float]) -> list[float]:
    return moves(gated, *((Estimate(slope=t, stderr=1.0), Context()) for t in ts))


def test_weight_decay_rule_by_hand() -> None:
    # u -= 0.5 clip(t / 4, +-1) if |t| > 1
    expected = [0, 0, -0.5 * 1.1 / 4, 0.25, -0.5, 0.5]
    assert moves_at(Gated(0.5), [0.5, -1.0, 1.1, -2.0, 4.0, -9.0]) == pytest.approx(expected)


def test_accumulating_rule_by_hand() -> None:
    # Z <- .7 Z + t, n <- .49 n + 1, u -= .06 clip(Z / sqrt n / 2, +-1), no gate.
    # t = 1, 1, -3: Z = 1, 1.7, -1.81; n = 1, 1.49, 1.7301.
    expected = [-0.03, -0.03 * 1.7 / math.sqrt(1.49), 0.03 * 1.81 / math.sqrt(1.7301)]
    assert moves_at(Gated(0.06, gate=0, saturation=2, memory=0.7), [1, 1, -3]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("total_steps", "expected"),
    [
        (None, [-0.1, -0.2, -0.2, -0.2]),
        (4000, [-0.1, -0.2, -0.2, -0.2]),
        (1000, [-0.1, -0.2, -0.2, -0.2]),
        (500, [-0.1, -0.2, -0.4, -0.4]),
        (100, [-0.1, -0.2, -0.45, -0.6]),
    ],
)
def test_a_short_run_goes_further_where_there_is_no_doubt(total_steps: int | None, expected: list[float]) -> None:
    gated, context = Gated(0.2, run_steps=1000), Context(total_steps=total_steps)
    given = [(Estimate(slope=t, stderr=1.0), context) for t in (2.0, 4.0, 6.0, 20.0)]
    assert moves(gated, *given) == pytest.approx(expected)


def test_an_error_of_few_numbers_counts_for_less() -> None:
    """t of 4 on 7 degrees of freedom is as unlikely as a normal deviate of 2.79."""
    few = moves(Gated(0.2, saturation=4.0), (Estimate(slope=4.0, stderr=1.0, freedom=7.0), Context()))
    assert few == pytest.approx([-0.2 * 2.788 / 4.0], rel=1e-3)


def test_a_t_of_few_degrees_of_freedom_is_a_normal_deviate_over_a_wider_error() -> None:
    few = Estimate(slope=-4.0, stderr=1.0, freedom=7.0)
    assert few.slope / few.normal_stderr == pytest.approx(-2.788, rel=1e-3)
    for estimate in (Estimate(slope=4.0, stderr=1.0), Estimate(slope=4.0, stderr=0.0, freedom=7.0)):
        assert estimate.normal_stderr == estimate.stderr
    assert Estimate(slope=0.0, stderr=1.0, freedom=7.0).normal_stderr == 1.0
    assert Estimate(slope=4.0, freedom=7.0).normal_stderr == math.inf


@pytest.mark.parametrize("taught", [True, False], ids=["the first window taught", "it did not"])
@pytest.mark.parametrize(("excess", "factor"), [(None, 1.0), (0.9, 1.0), (2.0, 2.5)])
def test_a_pretrained_model_goes_further(excess: float | None, factor: float, taught: bool) -> None:
    gated = Gated(0.2, pretrained_boost=2.5)
    first = Estimate(slope=2.0, stderr=1.0 if taught else math.inf, excess=excess)
    given = [(first, Context()), *((Estimate(slope=t, stderr=1.0), Context()) for t in (2.0, -8.0))]
    assert moves(gated, *given) == pytest.approx([-0.1 * factor * taught, -0.1 * factor, 0.2 * factor])


def test_that_a_model_was_pretrained_is_kept_with_sums_of_sub_batches() -> None:
    told = Estimate.of_sub_batches(np.array([1.0, 3.0]))
    _, state = Gated().step(GatedState(), replace(told, excess=2.0), Context())
    assert Gated().step(state, told, Context())[1] == GatedState(sums=(1.0, 3.0), pretrained=True)


def test_a_run_that_goes_back_still_knows_that_its_model_was_pretrained() -> None:
    gated = Gated(0.2, memory=0.9, pretrained_boost=2.5)
    _, state = gated.step(gated.start(), Estimate(slope=2.0, stderr=1.0, excess=2.0), Context())
    for move, back in (gated.retreat(state, Context(), worked=1.0), gated.restart(state, Context())):
        assert (move, back) == (0.0, replace(gated.start(), pretrained=True))


@pytest.mark.parametrize(("excess", "down", "there"), [(2.0, 0.2, True), (2.0, 0.3, False), (0.9, 0.2, False)])
def test_a_pretrained_models_regulariser_that_comes_near_its_bound_goes_there(
    excess: float, down: float, there: bool
) -> None:
    """What explores beside a bound trains with levels further away than the base."""
    gated = Gated(0.1, pretrained_reach=0.15)
    (move,) = moves(gated, (Estimate(slope=4.0, stderr=1.0, excess=excess), Context(down=down)))
    assert move == pytest.approx(-down - 0.15 if there else -0.1)
    (raised,) = moves(gated, (Estimate(slope=-4.0, stderr=1.0, excess=excess), Context(down=0.0)))
    assert raised == pytest.approx(0.1)


def test_weak_windows_add_up_only_with_memory() -> None:
    weak = [0.7] * 8
    assert not any(moves_at(Gated(), weak))
    assert moves_at(Gated(memory=0.7), weak)[-1] < 0


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


def test_a_window_moves_by_its_share() -> None:
    gated, estimate = Gated(0.4, window_steps=40, max_scale=2.5), Estimate(slope=9.0, stderr=1.0)

    def move(length: int) -> float:
        return gated.step(gated.start(), estimate, Context(length=length))[0]

    assert move(10) == pytest.approx(-0.1)
    assert move(40) == pytest.approx(-0.4)
    assert move(80) == pytest.approx(-0.8)
    assert move(100) == pytest.approx(-1.0)
    assert move(400) == pytest.approx(-1.0), "by max_scale rates at the most"


def test_a_window_forgets_its_share() -> None:
    """Memory 0.5 for 40 steps: 80 keep a quarter, 20 keep 0.71; the variance of a placebo stays 1."""
    gated, two = Gated(0.4, window_steps=40, memory=0.5), Estimate(slope=2.0, stderr=1.0)
    for length, kept in ((40, 0.5), (80, 0.25), (20, math.sqrt(0.5))):
        _, state = gated.step(GatedState(total=8.0, variance=3.0), two, Context(length=length))
        assert state.total == pytest.approx(8.0 * kept + 2.0)
        assert state.variance == pytest.approx(3.0 * kept**2 + 1.0)


def test_one_window_of_80_steps_is_no_other_than_two_of_40() -> None:
    gated, quiet = Gated(0.4, window_steps=40, memory=0.6), Estimate(slope=1e-9, stderr=1.0)
    _, long = gated.step(GatedState(total=5.0, variance=2.0), quiet, Context(length=80))
    state = GatedState(total=5.0, variance=2.0)
    for _ in range(2):
        _, state = gated.step(state, quiet, Context(length=40))
    assert long.total == pytest.approx(state.total)


def test_without_window_steps_all_windows_count_alike() -> None:
    gated, estimate = Gated(0.4, memory=0.5), Estimate(slope=9.0, stderr=1.0)
    results = [gated.step(GatedState(3.0, 1.0), estimate, Context(length=length)) for length in (1, 40, 4000)]
    assert results[0] == results[1] == results[2]
    assert results[0][0] == pytest.approx(-0.4)


def test_late_in_the_run_it_neither_listens_nor_moves() -> None:
    gated, sure = Gated(0.4, until=0.85), Estimate(slope=9.0, stderr=1.0)
    assert [gated.listens(step, 100) for step in (0, 84, 85, 99)] == [True, True, False, False]
    assert gated.listens(10**9, None)
    state = GatedState(1.0, 1.0)
    assert gated.step(state, sure, Context(step=85, total_steps=100)) == (0.0, state)
    assert gated.step(state, sure, Context(step=84, total_steps=100))[0] == pytest.approx(-0.4)
    assert Gated(0.4).listens(99, 100)
