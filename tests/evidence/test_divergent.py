"""Divergent evidence against dynamics that can be solved with pencil and paper.

A weight vector w under loss c . w has the gradient c wherever it stands, so that SGD at rate r is at
w_0 - t r c after t steps, and every slope below is exact.
"""

from __future__ import annotations

import math
from typing import Any

import explicit_loop
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hdet
from hdet import Engine, Probe
from hdet.contrib import Kalman, Marginal
from hdet.controllers import Estimate, Ruled
from hdet.controllers.rules import SlopeSum
from hdet.designs import Fixed, Hadamard, Permutation
from hdet.estimators import Estimator, LeastSquares
from hdet.evidence import Divergent
from hdet.evidence.divergent import DivergentCollector
from hdet.spaces import Linear
from hdet.spreads import OneSided, Symmetric, TwoLevel

T, RATE, WIDTH = 6, 0.1, 0.2
SLOPE = torch.tensor([1.0, -2.0, 0.5])
SQUARE = float(SLOPE @ SLOPE)


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([3.0, 1.0, -2.0]))
        self.scale = 1.5


def slanted(model: Any, batch: Any) -> Tensor:
    loss: Tensor = SLOPE @ model.w + (0.0 if batch is None else batch)
    return loss


def curved(model: Any, batch: Any) -> Tensor:
    loss: Tensor = 0.5 * (model.w @ model.w)
    return loss


def run(
    knobs: list[hdet.Knob],
    *,
    n: int = 4,
    loss: Any = slanted,
    at: Any = None,
    before_close: Any = lambda engine: None,
    probe_loss: Any = None,
    weight_decay: float = 0.0,
    **options: Any,
) -> tuple[Engine, dict[str, dict[str, Any]]]:
    """One window of T steps; the engine, and the estimates on record."""
    model = Vector()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, weight_decay=weight_decay)
    if at is not None:
        options["signal"] = Probe(probe_loss or loss, [0.0, 0.5], at=at)
    engine = Engine(hdet.replicate(model, optimizer, n=n), knobs, window=T, total_steps=T, **options)
    (record,) = explicit_loop.train(
        engine,
        loss=lambda model, step, index: loss(model, None),
        stepped=lambda step: before_close(engine) if step == T - 1 else None,
    )
    return engine, record.estimates


def secant(width: float) -> float:
    """Two levels +-w on e^u measure sinh(w) / w where the derivative is 1."""
    return math.sinh(width) / width


# The steps a rate has acted for on average: all of them at the last weights, half of T + 1 at averaged ones,
# half of T - 1 in the training loss, which is taken before each update.
@pytest.mark.parametrize(("at", "steps"), [("last", T), ("average", (T + 1) / 2), (None, (T - 1) / 2)])
@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_the_slope_in_a_learning_rate(at: Any, steps: float, gradients: Any) -> None:
    knob = hdet.LearningRate(spread=TwoLevel(WIDTH))
    _, estimates = run([knob], at=at, gradients=gradients)
    want = -steps * RATE * SQUARE * secant(WIDTH)
    assert estimates["learning_rate"]["slope"] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("spread", [TwoLevel(0.4), OneSided(0.4), OneSided(0.4, "down"), Symmetric(0.4)])
def test_a_slope_is_in_coordinate_units_whatever_the_spread(spread: Any) -> None:
    """In a linear coordinate the loss is linear in the rate, and every spread measures the same."""
    knob = hdet.LearningRate(spread=spread, space=Linear(0.1))
    _, estimates = run([knob], at="last", n=6)
    assert estimates["learning_rate"]["slope"] == pytest.approx(-T * 0.1 * SQUARE, rel=1e-5)


def test_near_a_bound_the_levels_in_force_count() -> None:
    """Half of the drawn width was all there was room for."""
    knob = hdet.LearningRate(spread=TwoLevel(0.4), bounds=(0.0, RATE * math.exp(0.2)))
    engine, estimates = run([knob], at="last")
    assert max(engine.history.windows[0].values["learning_rate"]) == pytest.approx(RATE * math.exp(0.2))
    assert estimates["learning_rate"]["slope"] == pytest.approx(-T * RATE * SQUARE * secant(0.2), rel=1e-5)


def test_a_base_on_its_bound_tells_nothing() -> None:
    _, estimates = run([hdet.LearningRate(spread=TwoLevel(0.4), bounds=(0.0, RATE))], at="last")
    assert estimates["learning_rate"]["t"] == 0.0


def test_knobs_are_told_apart_by_one_design() -> None:
    """Rate and decay at once: each slope is what the knob alone gives."""
    knobs = [hdet.LearningRate(spread=TwoLevel(0.01)), hdet.WeightDecay(spread=TwoLevel(0.01))]
    engine, joint = run(knobs, at="last", n=8, weight_decay=0.1)
    first, second = (knob.levels for knob in engine.knobs)
    assert not first.any()
    assert not second.any()
    for knob in knobs:
        _, alone = run([knob], at="last", weight_decay=0.1)
        name = knob.label
        assert joint[name]["slope"] == pytest.approx(alone[name]["slope"], rel=1e-2)
    assert abs(joint["weight_decay"]["slope"]) > 0.05


def test_sub_batches_give_the_standard_error() -> None:
    """Replicas that share gradients lie on a line: a fit without residuals must not be believed for that."""
    scales = iter([1.0, 1.2, 0.8, 1.0] * 100)

    def noisy(model: Any, batch: Any) -> Tensor:
        return slanted(model, None) * float(batch)

    model = Vector()
    engine = Engine(
        hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=RATE), n=4),
        [hdet.LearningRate(spread=TwoLevel(WIDTH))],
        window=1,
        signal=Probe(noisy, [next(scales) for _ in range(4)]),
        total_steps=1,
    )
    (record,) = explicit_loop.train(engine, loss=lambda model, step, index: slanted(model, None))
    slope = -RATE * SQUARE * secant(WIDTH)
    estimate = record.estimates["learning_rate"]
    assert estimate["slope"] == pytest.approx(slope, rel=1e-4)
    assert estimate["stderr"] == pytest.approx(abs(slope) * np.std([1.0, 1.2, 0.8, 1.0], ddof=1) / 2, rel=1e-4)


def test_a_failed_replica_is_not_heard() -> None:
    def spoil(engine: Engine) -> None:
        with torch.no_grad():
            engine.replicas[1].model.w.fill_(math.nan)

    knob = hdet.LearningRate(spread=Symmetric(WIDTH), space=Linear(0.1))
    _, whole = run([knob], at="last", n=5)
    _, spoilt = run([knob], at="last", n=5, before_close=spoil)
    assert spoilt["learning_rate"]["slope"] == pytest.approx(whole["learning_rate"]["slope"], rel=1e-5)


# -- merged weights, tilted along the contrast ----------------------------------------------------


@pytest.mark.parametrize("tilt", [0.5, 1.0])
def test_tilting_measures_the_same_slope(tilt: float) -> None:
    _, estimates = run([hdet.LearningRate(spread=TwoLevel(WIDTH))], at="last", evidence=Divergent(tilt=tilt))
    want = -T * RATE * SQUARE * secant(WIDTH)
    assert estimates["learning_rate"]["slope"] == pytest.approx(want, rel=1e-4)


def test_a_sub_batch_that_is_not_finite_for_any_replica_is_told() -> None:
    knob = hdet.LearningRate(spread=TwoLevel(0.2))
    with pytest.warns(UserWarning, match=r"not finite on sub-batches \[1\] of 2, at any weights"):
        _, estimates = run([knob], signal=Probe(slanted, [1.0, math.nan]))
    assert estimates["learning_rate"]["stderr"] == math.inf


def test_tilting_measures_curvature() -> None:
    """Of |w|^2 / 2 along C it is |C|^2, C = d w_T / d u."""
    knob = hdet.LearningRate(spread=TwoLevel(WIDTH))
    _, estimates = run([knob], at="last", probe_loss=curved, evidence=Divergent(tilt=1.0))
    contrast = -T * RATE * SLOPE * secant(WIDTH)
    middle = torch.tensor([3.0, 1.0, -2.0]) - T * RATE * SLOPE * math.cosh(WIDTH)
    estimate = estimates["learning_rate"]
    assert estimate["slope"] == pytest.approx(float(middle @ contrast), rel=1e-4)
    assert estimate["curvature"] == pytest.approx(float(contrast @ contrast), rel=1e-3)


@pytest.mark.parametrize("tilt", [None, 1.0])
def test_a_forward_knobs_own_value_is_part_of_what_is_judged(tilt: Any) -> None:
    """loss = a w . c at a = 1.5 e^u: the weights answer to a, and the loss contains it."""

    def scaled(model: Any, batch: Any) -> Tensor:
        return model.scale * slanted(model, None) + (0.0 if batch is None else batch)

    knob = hdet.Scalar("a", path="scale", bounds=(0.1, 10.0), spread=TwoLevel(0.01))
    _, estimates = run([knob], at="last", loss=scaled, gradients="local", evidence=Divergent(tilt=tilt))
    moved = T * RATE * 1.5 * SQUARE
    start = float(SLOPE @ torch.tensor([3.0, 1.0, -2.0]))
    want = 1.5 * (start - moved) - 1.5 * moved  # a dL/da + a c . dw/da a
    assert estimates["a"]["slope"] == pytest.approx(want, rel=1e-3)


def test_rules_take_levels_whose_mean_is_off_the_base_for_no_look_ahead() -> None:
    knob = hdet.LearningRate(spread=OneSided(WIDTH), controller=Ruled(rules=(SlopeSum(window_steps=None),)))
    model = Vector()
    engine = Engine(
        hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=RATE), n=7),
        [knob],
        window=T,
        total_steps=2 * T,
        signal=Probe(slanted, [0.0, 0.5]),
        evidence=Divergent(tilt=1.0),
    )
    (record,) = explicit_loop.train(engine, T, loss=lambda model, step, index: slanted(model, None))
    assert record.estimates["learning_rate"]["offset"] > 0.0
    assert record.reasons["learning_rate"] == {"rule": "slope_sum"}


def test_tilting_leaves_no_trace() -> None:
    """Every replica has its own weights and values until the merge."""
    before: list[Any] = []

    def keep(engine: Engine) -> None:
        before.extend(replica.model.w.detach().clone() for replica in engine.replicas)

    engine, _ = run(
        [hdet.LearningRate(spread=TwoLevel(WIDTH))], at="last", before_close=keep, evidence=Divergent(tilt=1.0)
    )
    torch.testing.assert_close(engine.replicas[0].model.w.detach(), torch.stack(before).mean(dim=0))
    assert engine.optimizers[1].param_groups[0]["lr"] == engine.bases["learning_rate"]


def test_tilting_does_not_read_a_knob_out_of_others_buffers(problem: Any, train: Any) -> None:
    """BatchNorm's statistics differ by the replicas' data; points evaluated on several replicas must not."""
    model = problem.model(nn.BatchNorm1d(6))
    engine = Engine(
        hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.05), n=4),
        [hdet.LearningRate(spread=TwoLevel(1e-4))],
        window=5,
        signal=problem.probe(),
        evidence=Divergent(tilt=1.0),
        total_steps=5,
    )
    (record,) = train(engine)
    assert abs(record.estimates["learning_rate"]["slope"]) < 10.0  # by differing statistics it would be 100s


def test_a_failed_replica_takes_no_part_in_a_tilt() -> None:
    def spoil(engine: Engine) -> None:
        with torch.no_grad():
            engine.replicas[0].model.w.fill_(math.nan)

    _, estimates = run(
        [hdet.LearningRate(spread=TwoLevel(WIDTH))], at="last", before_close=spoil, evidence=Divergent(tilt=1.0)
    )
    want = -T * RATE * SQUARE * secant(WIDTH)
    assert estimates["learning_rate"]["slope"] == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("tilt", [None, 1.0])
def test_more_knobs_than_replicas_can_tell_apart_are_not_believed(tilt: Any) -> None:
    knobs = [hdet.LearningRate(spread=TwoLevel(WIDTH)), hdet.WeightDecay(schedule=0.1, spread=TwoLevel(WIDTH))]
    _, estimates = run(knobs, at="last", n=2, evidence=Divergent(tilt=tilt))
    assert [estimates[name]["t"] for name in ("learning_rate", "weight_decay")] == [0.0, 0.0]


# -- what is drawn --------------------------------------------------------------------------------


def collector(knobs: list[hdet.Knob], n: int = 8, **options: Any) -> tuple[Engine, DivergentCollector]:
    model = Vector()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=0.1)
    engine = Engine(hdet.replicate(model, optimizer, n=n), knobs, **options)
    (only,) = engine.cycle.collectors
    assert isinstance(only, DivergentCollector)
    return engine, only


def test_two_level_spreads_get_an_orthogonal_design() -> None:
    knobs = [hdet.LearningRate(), hdet.WeightDecay(), hdet.Momentum()]
    engine, own = collector(knobs)
    assert own.design == Hadamard()
    levels = np.stack([knob.levels for knob in engine.knobs], axis=1)
    np.testing.assert_allclose(levels.T @ levels, np.diag((levels**2).sum(axis=0)), atol=1e-12)


def test_graded_spreads_get_permutations_and_a_design_may_be_chosen() -> None:
    _, own = collector([hdet.LearningRate(), hdet.WeightDecay(spread=Symmetric(0.5))])
    assert own.design == Permutation()
    _, own = collector([hdet.LearningRate()], evidence=Divergent(design=Fixed()))
    assert own.design == Fixed()


def test_levels_are_offsets_from_the_base() -> None:
    """Not from their own mean, which a one-sided spread has elsewhere; a memory of places needs that."""
    seen: list[Any] = []

    @hdet.spec.register
    class Watch(Estimator):
        kind = "watch"

        def start(self, knobs: int) -> Any:
            return Marginal().start(knobs)

        def estimate(self, state: Any, comparison: Any) -> Any:
            seen.append(comparison)
            return [Estimate.nothing()] * comparison.knobs, state

    try:
        run([hdet.LearningRate(spread=OneSided(0.4))], evidence=Divergent(estimator=Watch()))
    finally:
        del Estimator._members["watch"]
    (comparison,) = seen
    assert sorted(comparison.levels[:, 0]) == pytest.approx([0.0, 0.0, 0.4, 0.4])
    assert comparison.shifts.tolist() == [0.0]
    assert comparison.losses.shape == (4,)


def test_replicas_with_gradients_of_their_own_are_noisier_than_sub_batches_show() -> None:
    assert collector([hdet.LearningRate()])[1].estimator == LeastSquares()
    assert collector([hdet.LearningRate()], gradients="local")[1].estimator == LeastSquares(replica_noise=True)
    chosen = Divergent(estimator=Kalman())
    assert collector([hdet.LearningRate()], gradients="local", evidence=chosen)[1].estimator == Kalman()


def test_knobs_with_evidence_of_their_own_are_judged_apart() -> None:
    own = Divergent(estimator=Marginal())
    model = Vector()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, weight_decay=0.1)
    knobs = [hdet.LearningRate(), hdet.WeightDecay(evidence=own)]
    engine = Engine(hdet.replicate(model, optimizer, n=4), knobs, window=2)
    assert [[knob.name for knob in one.knobs] for one in engine.cycle.collectors] == [
        ["learning_rate"],
        ["weight_decay"],
    ]
    for _ in range(2):
        record = engine.step([1.0, 2.0, 3.0, 4.0])
    assert record is not None
    assert set(record.estimates) == {"learning_rate", "weight_decay"}
