"""Contrast at and near the bounds of a knob: when it explores there, and between which levels."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import explicit_loop
import numpy as np
import pytest
import torch
from contrast_parts import AIM, ONE_STEP, RATE, SCALE, SLOPE, WIDTH, knob, make, noisy, on_bound, regulariser, train
from torch import Tensor

from hdet import Engine
from hdet.controllers import Estimate, Ruled
from hdet.controllers.rules import SlopeSum
from hdet.evidence import Contrast, Evidence, MixedDifference
from hdet.evidence.scene import Harvest, Scene, Window
from hdet.schedules import FromCallable
from hdet.signals import Objective


def constant(model: Any, batch: float) -> Tensor:
    loss: Tensor = batch + 0.0 * model.w.sum()
    return loss


def explored_windows(
    engine: Engine, training: Callable[[int], float], of: Callable[[Any], float] = lambda model: model.late
) -> list[int]:
    """The windows in which a knob left its base, where the training loss of a step is `training`."""
    seen: list[float] = []
    base = of(engine.replicas[0].model)
    train(engine, watch=lambda model: seen.append(of(model)), report=lambda step, own: torch.tensor(training(step)))
    windows = np.array(seen).reshape(-1, engine.cycle.window.stop - engine.cycle.window.start, engine.size)
    return [number for number, window in enumerate(windows) if (window != base).any()]


def test_on_its_bound_a_regulariser_is_explored_inside_where_held_out_loss_exceeds_training_loss() -> None:
    """Half of the passes of every step run at sin^2(2 * 0.15), the others at 0 itself."""
    engine = make([regulariser()], window=10, windows=10, probe=constant)
    seen: list[float] = []
    train(engine, watch=lambda model: seen.append(model.late), report=lambda step, own: torch.tensor(0.8))
    steps = np.array(seen).reshape(100, 4)
    assert not steps[:30].any()
    for step in range(30, 100):
        assert sorted(steps[step]) == pytest.approx([0.0, 0.0, math.sin(0.3) ** 2, math.sin(0.3) ** 2])


@pytest.mark.parametrize(("bound_from", "first"), [(0.0, 1), (0.3, 3), (0.55, 6), (1.0, None)])
def test_on_its_bound_a_regulariser_rests_before_a_share_of_the_run(bound_from: float, first: int | None) -> None:
    """And always in the first window, before which no training loss is known."""
    engine = make([regulariser(Contrast(bound_from=bound_from))], window=10, windows=10, probe=constant)
    want = [] if first is None else list(range(first, 10))
    assert explored_windows(engine, lambda step: 0.8) == want


@pytest.mark.parametrize(
    ("batches", "training", "explores"),
    [
        ((1.0, 1.0), 0.97, True),  # 0.03 above, and 2 % of it are 0.0194
        ((1.0, 1.0), 0.985, False),
        ((1.0, 1.2), 0.85, True),  # 0.25 above 1.1; two standard errors are 0.2 and 2 % 0.017
        ((1.0, 1.2), 0.89, False),
        ((-1.0, -1.0), -1.03, True),
        ((-1.0, -1.0), -1.01, False),
        ((1.0, 1.0), 5.0, False),
    ],
)
def test_the_gap_must_exceed_two_standard_errors_and_two_percent(
    batches: tuple[float, float], training: float, explores: bool
) -> None:
    engine = make([regulariser(Contrast(bound_from=0.0))], window=5, windows=3, probe=constant, batches=batches)
    assert explored_windows(engine, lambda step: training) == ([1, 2] if explores else [])


def test_it_goes_by_the_last_windows_training_loss() -> None:
    engine = make([regulariser(Contrast(bound_from=0.0))], window=5, windows=6, probe=constant)
    assert explored_windows(engine, lambda step: 0.5 if step // 5 in (1, 3) else 1.5) == [2, 4]


@pytest.mark.parametrize(
    ("batches", "training", "explores"),
    [
        ((1.0, 1.0), 0.79, True),  # 0.21 above, and a quarter of it is 0.1975
        ((1.0, 1.0), 0.81, False),
        ((1.0, 1.2), 0.71, True),  # 0.39 above 1.1; two standard errors are 0.2 and a quarter 0.1775
        ((1.0, 1.2), 0.73, False),
        ((-1.0, -1.0), -1.35, True),
        ((-1.0, -1.0), -1.32, False),
    ],
)
def test_in_fine_tuning_the_gap_must_exceed_two_standard_errors_and_a_quarter(
    batches: tuple[float, float], training: float, explores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the first windows, whose losses are alike, have told that both are on one scale; a run resumed knows it."""
    monkeypatch.setattr(Scene, "excess", 2.0)
    engine, resumed = (
        make([regulariser(Contrast(bound_from=0.0))], window=5, windows=6, probe=constant, batches=batches)
        for _ in range(2)
    )
    level = sum(batches) / 2
    train(engine, 15, report=lambda step, own: torch.tensor(level))
    resumed.load_state_dict(engine.state_dict())
    assert explored_windows(resumed, lambda step: training) == ([1, 2] if explores else [])


def off_after_35_steps(step: int) -> float:
    return 0.2 if step < 35 else 0.0


@pytest.mark.parametrize(("training", "explores"), [(0.6, True), (0.99, False)])
def test_a_base_that_comes_to_its_bound_late_is_compared(training: float, explores: bool) -> None:
    """A training loss that is far below the held-out one is no sign of another scale by then."""
    ends = FromCallable(f"{__name__}:off_after_35_steps")
    engine = make([regulariser(Contrast(bound_from=0.0), schedule=ends)], window=5, windows=10, probe=constant)
    seen: list[float] = []
    train(engine, watch=lambda model: seen.append(model.late), report=lambda step, own: torch.tensor(training))
    assert any(value > 0.0 for value in seen[4 * 40 :]) is explores


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_a_loss_divided_by_the_micro_batches_is_no_sign_of_overfitting(micro_batches: int) -> None:
    """And it is said, once, at the line of the loop."""
    engine = make([regulariser(Contrast(bound_from=0.5))], window=5, windows=6, probe=constant)
    with pytest.warns(UserWarning, match="not on one scale") as caught:
        assert explored_windows(engine, lambda step: 1.0 / micro_batches) == []
    assert [warning.filename for warning in caught] == [explicit_loop.__file__]
    # What was found out is part of the state: the loop that goes on in mid-run explores nothing, and is told no more.
    again = make([regulariser(Contrast(bound_from=0.5))], window=5, windows=6, probe=constant)
    with pytest.warns(UserWarning, match="not on one scale"):
        train(again, 17, report=lambda step, own: torch.tensor(1.0 / micro_batches))
    resumed = make([regulariser(Contrast(bound_from=0.5))], window=5, windows=6, probe=constant)
    resumed.load_state_dict(again.state_dict())
    assert [collector.levels.other_scale for collector in resumed.cycle.collectors] == [True]


@pytest.mark.parametrize(
    ("low", "explored"),
    [({0}, [3, 4, 5]), ({1}, [1, 2, 3, 4, 5]), ({0, 1}, []), ({0, 2}, []), ({0, 1, 2}, []), (set(), [1, 2, 3, 4, 5])],
)
def test_a_second_window_has_to_agree_that_losses_are_on_two_scales(low: set[int], explored: list[int]) -> None:
    """One whose held-out loss rose by steps that were far too large does not tell it; a run resumed counts on."""

    def losses(step: int) -> float:
        return 0.5 if step // 5 in low else 0.9

    def fresh() -> Engine:
        return make([regulariser(Contrast(bound_from=0.0))], window=5, windows=6, probe=constant)

    def told() -> AbstractContextManager[Any]:
        return nullcontext() if explored else pytest.warns(UserWarning, match="not on one scale")

    with told():
        assert explored_windows(fresh(), losses) == explored
    begun, resumed = fresh(), fresh()
    with told():
        train(begun, 10, report=lambda step, own: torch.tensor(losses(step)))
        resumed.load_state_dict(begun.state_dict())
        assert explored_windows(resumed, losses) == [number - 2 for number in explored if number >= 2]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_held_out_loss_that_is_not_finite_tells_nothing_of_scales(loss: float) -> None:
    engine = make([regulariser(Contrast(bound_from=0.0))], window=10, windows=12, batches=(loss, 1.0), probe=constant)
    levels = engine.cycle.collectors[0].levels
    levels.place(Window(1, 10, 20, 120), 10, 0.5)
    assert levels.half.tolist() == [0.0]
    assert (levels.other_scale, levels.told_of_scale) == (None, (0, -1))


def test_a_knob_that_acts_in_eval_mode_is_explored_on_its_bound_from_the_start() -> None:
    engine = make([on_bound()], window=5, windows=6, probe=constant)
    assert explored_windows(engine, lambda step: 1.5, of=lambda model: model.rate) == list(range(6))


def test_off_its_bound_a_regulariser_is_explored_from_the_start() -> None:
    engine = make([regulariser(schedule=0.1)], window=5, windows=6, probe=constant)
    seen: list[float] = []
    train(engine, watch=lambda model: seen.append(model.late), report=lambda step, own: torch.tensor(1.5))
    assert 0.1 not in seen
    assert len(seen) == 6 * 5 * 4


def test_on_its_bound_the_estimate_is_taken_between_the_levels() -> None:
    """And says so: half a width off the base on the inner side."""

    def leaky(model: Any, step: int, index: int) -> Tensor:
        return (1.0 - model.rate) * (SLOPE @ model.w)

    (record,) = train(make([on_bound()], n=4, window=64), loss=leaky)
    estimate = record.estimates["rate"]
    assert estimate["offset"] == pytest.approx(0.15)
    per_step = -RATE * float(AIM @ SLOPE) * -(math.sin(0.3) ** 2) / 0.3
    assert estimate["slope"] == pytest.approx(64 * per_step, rel=1e-4)


def test_on_its_bound_rules_take_the_estimate_for_no_look_ahead() -> None:
    """It lies off the base, as one that was taken ahead of a warm-up does, of which most rules say nothing."""
    rules = Ruled(rules=(SlopeSum(window_steps=None),))
    record, _ = train(make([knob(bounds=(SCALE, 100.0), controller=rules)], window=16, windows=2), loss=noisy)
    assert record.estimates["a"]["offset"] > 0.0
    assert record.reasons["a"] == {"rule": "slope_sum"}


def test_near_a_bound_the_levels_lie_inside() -> None:
    engine = make([knob(bounds=(0.01, SCALE * math.exp(0.1)))], window=8)
    seen: list[float] = []
    (record,) = train(engine, watch=lambda model: seen.append(model.a))
    low, high = min(seen), max(seen)
    assert high == pytest.approx(SCALE * math.exp(0.1))
    assert low == pytest.approx(SCALE * math.exp(0.1 - 2 * WIDTH))
    estimate = record.estimates["a"]
    assert estimate["offset"] == pytest.approx(-0.1)
    want = -RATE * float(AIM @ SLOPE) * (high - low) / (2 * WIDTH)
    assert estimate["slope"] == pytest.approx(8 * want, rel=1e-4)


def test_where_both_bounds_are_near_the_width_gives_way() -> None:
    engine = make([knob(bounds=(SCALE * math.exp(-0.05), SCALE * math.exp(0.03)))])
    seen: list[float] = []
    (record,) = train(engine, watch=lambda model: seen.append(model.a))
    assert (min(seen), max(seen)) == pytest.approx((SCALE * math.exp(-0.05), SCALE * math.exp(0.03)))
    assert record.estimates["a"]["slope"] == pytest.approx(8 * ONE_STEP, rel=0.02)


def test_a_knob_that_rests_starves_no_other() -> None:
    """And what rests adds no noise and takes no rows."""
    engine = make([knob(), regulariser()], n=4, window=8, windows=8)
    records = train(engine, loss=noisy, report=lambda step, own: torch.tensor(1e6))
    assert all(record.estimates["a"]["t"] != 0.0 for record in records)
    assert not any(record.estimates["regulariser_for_tests"]["t"] for record in records)
    alone = train(make([knob()], n=4, window=8, windows=8), loss=noisy)
    sizes = [np.median([record.estimates["a"]["stderr"] for record in run]) for run in (records, alone)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.25)


@pytest.mark.parametrize(
    ("base", "sign", "went_back", "explored"),
    [
        (0.0, 1.0, False, [1, 4, 10]),
        (0.9, -1.0, False, [1, 4, 10]),
        (0.0, -1.0, False, list(range(1, 12))),
        (0.9, 1.0, False, list(range(1, 12))),
        (0.0, 1.0, True, [1, 3, 8]),
    ],
)
def test_where_evidence_calls_for_its_bound_it_rests_until_the_run_is_twice_as_long(
    base: float, sign: float, went_back: bool, explored: list[int]
) -> None:
    """Less of the knob makes steps longer, towards a lower held-out loss or away from it.

    A run that is resumed knows, and one that has gone back no longer.
    """

    def probe(model: Any, batch: float) -> Tensor:
        return batch + AIM @ (model.w - model.w.detach())

    def loss(model: Any, step: int, index: int) -> Tensor:
        return sign * (1.0 - model.late) * (SLOPE @ model.w)

    seen: list[float] = []
    state: dict[str, Any] = {}
    for until in (25, 120):
        engine = make([regulariser(Contrast(bound_from=0.0), schedule=base)], window=10, windows=12, probe=probe)
        if state:
            engine.load_state_dict(state)
        if state and went_back:
            engine.cycle.collectors[0].forget()
        told = {"watch": lambda model: seen.append(model.late), "report": lambda step, own: torch.tensor(0.8)}
        train(engine, until, loss=loss, **told)
        state = engine.state_dict()
    by_window = np.array(seen).reshape(12, -1)
    assert [number for number, levels in enumerate(by_window) if (abs(levels - base) > 1e-9).any()] == explored


@pytest.mark.parametrize(("t", "step"), [(2.9, 0.0), (-2.9, 0.0), (3.1, 10.0), (-3.1, -10.0), (math.inf, 10.0)])
def test_a_single_window_is_believed_from_three_standard_errors_on(t: float, step: float) -> None:
    levels = make([regulariser()], window=10, windows=12).cycle.collectors[0].levels
    harvest = Harvest(Window(0, 0, 10, 120), np.ones(4), np.ones(4, dtype=bool))
    levels.told({0: Estimate(t, stderr=1.0) if math.isfinite(t) else Estimate(1.0, stderr=0.0)}, harvest)
    assert levels.called.tolist() == [step]


def test_one_that_is_told_by_few_sub_batches_has_to_be_as_unlikely_as_by_eight() -> None:
    """t is 5.8, which two sub-batches give by chance in one window of nine."""
    levels = make([regulariser()], window=10, windows=12).cycle.collectors[0].levels
    harvest = Harvest(Window(0, 0, 10, 120), np.ones(4), np.ones(4, dtype=bool))
    levels.told({0: Estimate.of_sub_batches(np.array([2.9, 4.1]))}, harvest)
    assert levels.called.tolist() == [0.0]


def test_a_knob_that_rests_hears_all_the_same_that_losses_are_on_two_scales() -> None:
    engine = make([regulariser(Contrast(bound_from=0.0))], window=10, windows=12, probe=constant)
    levels = engine.cycle.collectors[0].levels
    levels.called[:] = 120.0
    with pytest.warns(UserWarning, match="not on one scale"):
        assert explored_windows(engine, lambda step: 0.5) == []
    assert levels.other_scale is True


@pytest.mark.parametrize("evidence", [Contrast(), MixedDifference()])
def test_what_windows_called_for_is_kept_in_a_state_and_forgotten_on_the_way_back(evidence: Evidence) -> None:
    given = {"objective": Objective(constant, [1.0, 1.0])} if isinstance(evidence, MixedDifference) else {}
    collector, other = (make([regulariser(evidence)], n=1, **given).cycle.collectors[0] for _ in range(2))
    collector.levels.called[:], collector.levels.pretrained = 7.0, True
    other.levels.load_state_dict(collector.levels.state_dict())
    assert (other.levels.called.tolist(), other.levels.pretrained) == ([7.0], True)
    collector.forget()
    assert (collector.levels.called.tolist(), collector.levels.pretrained) == ([0.0], True)
    other.levels.load_state_dict({"other_scale": None})  # of an older version
    assert (other.levels.called.tolist(), other.levels.pretrained) == ([0.0], False)
