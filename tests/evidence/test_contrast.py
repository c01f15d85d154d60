"""Contrast evidence against finite differences of training, and against knobs that do nothing.

Under loss a (c . w) the gradient a c is the same wherever w is, so that one step of SGD at rate r does
-r (g_p . c) a du to a probe with gradient g_p: slopes below are exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from contrast_parts import (
    AIM,
    ONE_STEP,
    RATE,
    SCALE,
    SLOPE,
    STANDS_STILL,
    WIDTH,
    Vector,
    knob,
    make,
    noisy,
    read_out,
    scaled,
    secant,
    train,
)
from torch import Tensor, nn

import hdet
import hdet.testing
from hdet import Engine, Probe
from hdet.controllers import Estimate, Hold
from hdet.evidence import Contrast
from hdet.evidence.contrast import ContrastCollector
from hdet.evidence.parts.gradient_memory import Dots
from hdet.evidence.parts.two_levels import _added
from hdet.hparams.forward import ModuleKnob
from hdet.spreads import TwoLevel

# -- sign and size --------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "copies"), [(4, False), (4, True), (8, True), (6, False), (3, False), (12, False)])
def test_the_slope_is_what_one_step_does_to_the_probe(n: int, copies: bool) -> None:
    """Times the steps of the window, since this knob also acts in eval mode (where it does nothing here)."""
    engine = make([knob()], n=n, copies=copies, window=16)
    (record,) = train(engine)
    estimate = record.estimates["a"]
    assert estimate["slope"] == pytest.approx(16 * ONE_STEP * secant(), rel=1e-4)
    assert estimate["offset"] == 0.0


@pytest.mark.parametrize("n", [1, 2])
def test_with_few_replicas_several_steps_form_a_block(n: int) -> None:
    """Of 4 rows at least; the gradient is the same in all steps, so nothing else differs between them."""
    (record,) = train(make([knob()], n=n, window=32))
    assert record.estimates["a"]["slope"] == pytest.approx(32 * ONE_STEP * secant(), rel=1e-4)


def test_the_mean_probe_loss_is_what_counts() -> None:
    (record,) = train(make([knob()], batches=(1.0, 3.0)))
    assert record.estimates["a"]["slope"] == pytest.approx(2 * 8 * ONE_STEP * secant(), rel=1e-4)


def retrained(a: float, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], steps: int) -> float:
    """The probe after `steps` at SCALE (which warm the optimizer up) and one at `a`."""
    model = Vector()
    optimizer = make_optimizer(model)
    for step in range(steps + 1):
        model.a = a if step == steps else SCALE
        curved(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return read_out(model, 1.0).item()


def curved(model: Any, step: int = 0, index: int = 0) -> Tensor:
    noise = torch.randn(3, generator=torch.Generator().manual_seed(step))
    loss: Tensor = model.a * (SLOPE @ model.w) + 0.1 * (model.w @ model.w) + noise @ model.w
    return loss


def test_through_an_adaptive_optimizer_it_has_the_sign_of_training_again() -> None:
    """Its first window has no second moments to read and tells nothing; then P is that of the state."""

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.0, 0.99), weight_decay=0.0)

    engine = make([knob(spread=TwoLevel(0.02), evidence=Contrast(refresh=1))], window=16, windows=2, optimizer=adam)
    first, second = train(engine, loss=curved)
    assert second.estimates["a"]["t"] != 0.0
    wants = [
        (retrained(SCALE * 1.02, adam, steps) - retrained(SCALE / 1.02, adam, steps)) / (2 * math.log(1.02))
        for steps in range(16, 32)
    ]
    # v follows the gradient a little (1 - beta2 of it), which P taken as it stands leaves out.
    assert second.estimates["a"]["slope"] == pytest.approx(sum(wants), rel=0.15)
    assert first.estimates["a"]["t"] != second.estimates["a"]["t"]


def test_momentum_counts_a_gradient_for_all_it_will_do() -> None:
    def momentum(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.75)

    (record,) = train(make([knob()], optimizer=momentum))
    assert record.estimates["a"]["slope"] == pytest.approx(8 * 4 * ONE_STEP * secant(), rel=1e-4)


@pytest.mark.parametrize("copies", [False, True])
def test_maximising_turns_the_sign(copies: bool) -> None:
    def ascent(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=RATE, maximize=True)

    (record,) = train(make([knob()], optimizer=ascent, copies=copies))
    assert record.estimates["a"]["slope"] == pytest.approx(-8 * ONE_STEP * secant(), rel=1e-4)


def two(model: Any, step: int = 0, index: int = 0) -> Tensor:
    noise = 0.01 * torch.randn(3, generator=torch.Generator().manual_seed(100 * step + index))
    loss: Tensor = (model.a * SLOPE + model.b * AIM + noise) @ model.w
    return loss


def test_knobs_are_told_apart() -> None:
    engine = make([knob("a"), knob("b"), knob("idle")], n=4, window=16)
    (record,) = train(engine, loss=two)
    told = {name: record.estimates[name] for name in ("a", "b", "idle")}
    assert told["a"]["slope"] == pytest.approx(16 * ONE_STEP * secant(), rel=0.05)
    both = -RATE * float(AIM @ AIM) * 0.7
    assert told["b"]["slope"] == pytest.approx(16 * both * secant(), rel=0.05)
    assert abs(told["idle"]["slope"]) < 0.05 * abs(told["a"]["slope"])


def test_seats_of_one_model_measure_what_copies_measure() -> None:
    """The same batches at the same levels: a seat's gradient is what its own pass added."""
    one = train(make([knob("a"), knob("b")], windows=2), loss=two)
    many = train(make([knob("a"), knob("b")], windows=2, copies=True), loss=two)
    for left, right in zip(one, many, strict=True):
        for name in ("a", "b"):
            for number in ("slope", "stderr"):
                assert left.estimates[name][number] == pytest.approx(right.estimates[name][number], rel=1e-3)


# -- the design -----------------------------------------------------------------------------------


def test_signs_are_fresh_every_step_and_balanced() -> None:
    engine = make([knob("a")], n=4, window=40)
    rows = []
    for step in range(40):
        levels = engine.knobs[0].levels
        assert sorted(levels) == pytest.approx([-WIDTH, -WIDTH, WIDTH, WIDTH])
        rows.append(tuple(levels > 0))
        if step < 39:
            train(engine, step + 1)
    assert len(set(rows)) == 6  # all ways to choose 2 of 4
    assert any(a != b for a, b in itertools.pairwise(rows))


def test_a_pass_runs_at_its_level() -> None:
    seen: list[float] = []
    train(make([knob()], n=4, window=8), watch=lambda model: seen.append(model.a))
    assert sorted(seen) == pytest.approx([SCALE * math.exp(-WIDTH)] * 16 + [SCALE * math.exp(WIDTH)] * 16)


def test_without_a_spread_nothing_is_explored() -> None:
    seen: list[float] = []
    engine = make([knob(spread=TwoLevel(0.0))], window=16)
    (record,) = train(engine, watch=lambda model: seen.append(model.a))
    assert set(seen) == {SCALE}
    assert record.estimates["a"]["t"] == 0.0


def test_a_knob_without_a_spread_starves_no_other() -> None:
    (record,) = train(make([knob("a"), knob("b", spread=TwoLevel(0.0))], window=16), loss=two)
    assert record.estimates["b"]["t"] == 0.0
    assert record.estimates["a"]["slope"] == pytest.approx(16 * ONE_STEP * secant(), rel=0.05)


# -- few blocks -----------------------------------------------------------------------------------


class Halves(Vector):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(self.w.detach().clone())


def both(model: Any, step: int = 0, index: int = 0) -> Tensor:
    loss: Tensor = model.a * (SLOPE @ (model.w + model.other))
    return loss


@pytest.mark.parametrize("horizon", [0, 20])
@pytest.mark.parametrize(
    ("trained", "then", "slope"), [("w", "other", -1.0), ("w other", "w", 1.0), ("w", "w other", 0.0)]
)
def test_parameters_may_be_frozen_and_thawed_in_mid_run(horizon: int, trained: str, then: str, slope: float) -> None:
    """One half pulls the probe one way and the other the other way; the record starts anew in the second window."""

    def fresh() -> Engine:
        model = Halves()
        return Engine(
            hdet.micro_batches(model, torch.optim.SGD(model.parameters(), lr=RATE), n=4),
            [knob(evidence=Contrast(horizon=horizon))],
            window=16,
            signal=Probe(lambda model, batch: batch * (AIM @ (model.w - model.other)), (1.0, 1.0)),
            total_steps=32,
            seed=1,
        )

    engine = fresh()
    for until, names in ((16, trained), (27, then), (32, then)):
        if until == 32:  # taken up by a loop that freezes only after it has loaded
            (resumed := fresh()).load_state_dict(engine.state_dict())
            engine = resumed
        for name in ("w", "other"):
            getattr(engine.replicas[0].model, name).requires_grad_(name in names.split())
        train(engine, until, loss=both)
    expected = 16 * slope * ONE_STEP * secant()
    assert engine.history.windows[-1].estimates["a"]["slope"] == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("horizon", [0, 20])
@pytest.mark.parametrize("rates", [(0.0, RATE), (RATE, 0.0), (RATE, 2 * RATE)])
def test_each_group_counts_by_its_own_rate(rates: tuple[float, float], horizon: int) -> None:
    """A first group at rate 0 hides nothing of the others."""
    model = Halves()
    groups = [{"params": [own], "lr": rate} for own, rate in zip((model.w, model.other), rates, strict=True)]
    engine = Engine(
        hdet.micro_batches(model, torch.optim.SGD(groups), n=4),
        [knob(evidence=Contrast(horizon=horizon))],
        window=16,
        signal=Probe(lambda model, batch: batch * (AIM @ (model.w + 3 * model.other)), (1.0, 1.0)),
        total_steps=16,
    )
    (record,) = train(engine, loss=both)
    expected = 16 * (rates[0] + 3 * rates[1]) / RATE * ONE_STEP * secant()
    assert record.estimates["a"]["slope"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("horizon", [0, 20])
@pytest.mark.parametrize("copies", [False, True])
def test_a_gradient_that_overflows_costs_its_block(horizon: int, copies: bool) -> None:
    """As a GradScaler makes them by design, and leaves out the optimizer's step."""
    engine = make([knob(evidence=Contrast(horizon=horizon))], window=24, copies=copies)
    for step in range(24):
        if step != 5:
            train(engine, step + 1)
            continue
        for replica in engine.replicas:
            with replica:
                (scaled(replica.model) * (math.inf if replica.index == 2 else 1.0)).backward()
        engine.share_gradients()
        for optimizer in engine.optimizers:
            optimizer.zero_grad()
        engine.step([0.0] * 4)
    estimate = engine.history.windows[0].estimates["a"]
    assert estimate["slope"] == pytest.approx(24 * ONE_STEP * secant(), rel=1e-4)


def test_an_estimate_needs_eight_blocks_and_windows_save_them_up() -> None:
    """Three blocks a window: the third window has nine to judge by, and the count begins anew."""
    records = train(make([knob()], window=3, windows=6), loss=noisy)
    known = [record.estimates["a"]["t"] != 0.0 for record in records]
    assert known == [False, False, True, False, False, True]
    for record, ok in zip(records, known, strict=True):
        assert (record.estimates["a"]["stderr"] is not None and math.isfinite(record.estimates["a"]["stderr"])) == ok


def test_blocks_saved_are_all_counted() -> None:
    """The standard error over nine blocks is that of one window which had them all."""
    saved = train(make([knob()], window=3, windows=3), loss=noisy)[-1].estimates["a"]
    whole = train(make([knob()], window=9, windows=1), loss=noisy)[-1].estimates["a"]
    assert saved["slope"] / 3 == pytest.approx(whole["slope"] / 9, rel=1e-3)  # per step
    assert saved["t"] == pytest.approx(whole["t"], rel=1e-3)


def test_a_direction_of_zeros_teaches_nothing() -> None:
    """Adagrad has a state before its first step, which says that no gradient ever was."""
    engine = make([knob()], windows=2, optimizer=lambda m: torch.optim.Adagrad(m.parameters(), lr=RATE))
    stderrs = [record.estimates["a"]["stderr"] for record in train(engine)]
    assert stderrs[0] == math.inf
    assert stderrs[1] < math.inf


def test_one_replica_is_compared_with_itself_over_steps() -> None:
    """Blocks of four steps: two windows of 16 make eight."""
    records = train(make([knob()], n=1, window=16, windows=4), loss=noisy)
    assert [record.estimates["a"]["t"] != 0.0 for record in records] == [False, True, False, True]
    assert [record.estimates["a"]["freedom"] for record in records] == [None, 7.0, None, 7.0]


def test_where_two_errors_add_up_so_do_their_degrees_of_freedom() -> None:
    """By Welch and Satterthwaite: of equal errors of few and of many numbers, somewhat more than those of the few."""
    few = Estimate(slope=0.5, stderr=0.1, freedom=7.0)
    sub_batches = Estimate.of_sub_batches(np.array([0.9, 1.1, 1.0]))
    both = _added(1, few, Estimate(slope=1.0, stderr=0.0))
    assert both == replace(few, slope=1.5, freedom=both.freedom)
    assert both.freedom == pytest.approx(7.0)
    assert _added(4, few, Estimate(slope=1.0, stderr=0.4)).freedom == pytest.approx(4 * 7.0)
    a, b = 0.01, sub_batches.stderr**2
    assert _added(1, few, sub_batches).freedom == pytest.approx((a + b) ** 2 / (a**2 / 7 + b**2 / 2))
    assert _added(1, replace(few, freedom=None), Estimate(slope=1.0, stderr=0.1)).freedom is None
    assert _added(1, replace(few, stderr=0.0), Estimate(slope=1.0, stderr=0.0)).freedom is None


def test_a_block_that_the_windows_end_would_cut_short_is_not_explored() -> None:
    """19 steps of N = 1 are four blocks of four, and three steps at the base."""
    seen: list[float] = []
    engine = make([knob()], n=1, window=19, windows=2)
    train(engine, 19, loss=noisy, watch=lambda model: seen.append(model.a))
    assert seen[16:] == [SCALE] * 3
    assert SCALE not in seen[:16]
    (collector,) = engine.cycle.collectors
    assert isinstance(collector, ContrastCollector)
    assert isinstance(collector.record, Dots)
    assert [len(saved) for saved in collector.record.saved] == [4]
    train(engine, 38, loss=noisy, watch=lambda model: seen.append(model.a))
    for first in (*range(0, 16, 4), *range(19, 35, 4)):  # also of a window that begins within a block of the last
        assert [value > SCALE for value in seen[first : first + 4]].count(True) == 2


# -- knobs that act in eval mode too --------------------------------------------------------------


class Tempered(nn.Module):
    """y = w x / T."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))
        self.t = 2.0


def miss(model: Any, target: float) -> Tensor:
    loss: Tensor = (model.w / model.t - target).square()
    return loss


def tempered(steps: int, rate: float, target: float, probe_target: float) -> tuple[float, float]:
    """The slope in log T, and what training again at T e^(+-h) and testing there makes of it."""
    model = Tempered()
    engine = Engine(
        hdet.micro_batches(model, torch.optim.SGD(model.parameters(), lr=rate), n=4),
        [
            hdet.Scalar(
                "t",
                path="t",
                bounds=(0.1, 10.0),
                spread=TwoLevel(0.05),
                evidence=Contrast(refresh=1),
                controller=Hold(),
            )
        ],
        window=steps,
        signal=Probe(miss, [probe_target, probe_target]),
        total_steps=steps,
    )
    (record,) = train(engine, loss=lambda m, step, index: miss(m, target))

    def again(t: float) -> float:
        twin = Tempered()
        twin.t = t
        optimizer = torch.optim.SGD(twin.parameters(), lr=rate)
        for _ in range(steps):
            miss(twin, target).backward()
            optimizer.step()
            optimizer.zero_grad()
        return miss(twin, probe_target).item()

    h = 0.05
    want = (again(2.0 * math.exp(h)) - again(2.0 * math.exp(-h))) / (2 * h)
    return record.estimates["t"]["slope"], want


@pytest.mark.parametrize(
    ("steps", "rate", "target", "probe_target"),
    [(8, 0.01, 2.0, 2.0), (8, 0.05, 2.0, 2.0), (32, 0.01, 0.1, 0.1), (8, 0.01, 2.0, 0.2), (16, 0.02, 0.3, 1.0)],
)
def test_a_temperature_is_judged_by_what_it_does_and_by_what_is_learned(
    steps: int, rate: float, target: float, probe_target: float
) -> None:
    slope, want = tempered(steps, rate, target, probe_target)
    assert abs(want) > 0.05
    assert slope == pytest.approx(want, rel=0.15)


@STANDS_STILL
def test_the_direct_term_alone() -> None:
    """With a learning rate of next to nothing, only the value itself counts."""
    slope, want = tempered(8, 1e-9, 2.0, 2.0)
    assert slope == pytest.approx(want, rel=1e-3)
    assert slope == pytest.approx(2 * (0.5 - 2.0) * -0.5, rel=1e-2)


class Quiet(ModuleKnob):
    """`Vector.a`, said to act in training alone."""

    kind = "quiet_for_tests"
    role = "a"
    bounds: tuple[float, float] = (0.01, 100.0)

    def cells(self, model: nn.Module, pattern: str) -> Any:
        from hdet.hparams.binding import Attribute

        return {"a": Attribute(model, "a")}


def test_a_knob_of_training_alone_is_judged_by_one_step_and_read_once() -> None:
    """No direct term: the probe is evaluated for its gradient, and never at the levels."""
    seen: list[float] = []

    def watched(model: Any, batch: float) -> Tensor:
        seen.append(model.a)
        return read_out(model, batch)

    quiet = Quiet(spread=TwoLevel(WIDTH), evidence=Contrast(), controller=Hold())
    (record,) = train(make([quiet], probe=watched))
    assert record.estimates["quiet_for_tests"]["slope"] == pytest.approx(ONE_STEP * secant(), rel=1e-4)
    assert seen == [SCALE] * 2


def test_the_probe_is_read_at_the_base_and_in_eval_mode() -> None:
    states: list[tuple[float, bool]] = []

    def watched(model: Any, batch: float) -> Tensor:
        states.append((model.a, model.training))
        return read_out(model, batch)

    engine = make([knob(evidence=Contrast(refresh=4))], window=12, probe=watched)
    train(engine)
    directed = states[: 3 * 2]
    assert directed == [(SCALE, False)] * 6  # at steps 0, 4 and 8
    low, high = SCALE * math.exp(-WIDTH), SCALE * math.exp(WIDTH)
    # Two levels, evaluated by the first two seats; the others repeat one to learn how many sub-batches there are.
    assert sorted({round(a, 6) for a, _ in states[6:]}) == [round(low, 6), round(high, 6)]
    assert not any(training for _, training in states)
    assert engine.replicas[0].model.training
    assert engine.replicas[0].model.a == SCALE
