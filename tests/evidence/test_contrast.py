"""Contrast evidence against finite differences of training, and against knobs that do nothing.

Under loss a (c . w) the gradient a c is the same wherever w is, so that one step of SGD at rate r does
-r (g_p . c) a du to a probe with gradient g_p: slopes below are exact.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hdet
import hdet.testing
from hdet import Contrast, Engine, Probe
from hdet.controllers import Context, Estimate, Gated, Hold
from hdet.designs import Design, Fixed
from hdet.errors import IdentifiabilityError, StepError
from hdet.evidence.contrast import ContrastCollector
from hdet.evidence.parts.gradient_memory import Dots
from hdet.hparams.forward import ModuleKnob
from hdet.spaces import Arcsine, Space
from hdet.spreads import TwoLevel

RATE, WIDTH, SCALE = 0.1, 0.2, 1.5
SLOPE = torch.tensor([1.0, -2.0, 0.5])
AIM = torch.tensor([2.0, 1.0, 3.0])
STANDS_STILL = pytest.mark.filterwarnings("ignore:no weight of replica")
"""Weights that no step, or none worth the name, moves."""


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([3.0, 1.0, -2.0]))
        self.a = SCALE
        self.b = 0.7
        self.idle = 0.5
        self.rate = 0.0
        self.late = 0.0
        self.norm = nn.Identity()


def scaled(model: Any, step: int = 0, index: int = 0) -> Tensor:
    loss: Tensor = model.a * (SLOPE @ model.w)
    return loss


def read_out(model: Any, batch: float) -> Tensor:
    loss: Tensor = batch * (AIM @ model.w)
    return loss


def knob(name: str = "a", **options: Any) -> hdet.Scalar:
    given = {"bounds": (0.01, 100.0), "spread": TwoLevel(WIDTH), "controller": Hold(), **options}
    return hdet.Scalar(name, path=name, evidence=given.pop("evidence", Contrast()), **given)


def on_bound(name: str = "rate", **options: Any) -> hdet.Scalar:
    return knob(name, space=Arcsine(), bounds=(0.0, 0.9), spread=TwoLevel(0.15), **options)


def make(
    knobs: list[hdet.Knob],
    *,
    n: int = 4,
    copies: bool = False,
    window: int = 8,
    windows: int = 1,
    probe: Any = read_out,
    batches: Any = (1.0, 1.0),
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda m: torch.optim.SGD(m.parameters(), lr=RATE),
    **options: Any,
) -> Engine:
    model = Vector()
    return Engine(
        (hdet.replicate if copies else hdet.micro_batches)(model, optimizer(model), n=n),
        knobs,
        window=window,
        signal=Probe(probe, batches),
        total_steps=window * windows,
        **options,
    )


def train(
    engine: Engine,
    until: int | None = None,
    *,
    loss: Callable[[Any, int, int], Tensor] = scaled,
    watch: Callable[[Any], object] = lambda model: None,
    report: Callable[[int, Tensor], Tensor] = lambda step, own: own,
) -> list[hdet.WindowRecord]:
    records = []
    last = engine.total_steps if until is None else until
    assert last is not None
    for step in range(engine.step_count, last):
        losses = []
        for replica in engine.replicas:
            with replica:
                watch(replica.model)
                own = loss(replica.model, step, replica.index)
                own.backward()
            losses.append(report(step, own.detach()))
        engine.share_gradients()
        for optimizer in engine.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        record = engine.step(losses)
        if record is not None:
            records.append(record)
    return records


def train_outside(engine: Engine) -> None:
    losses = []
    for replica in engine.replicas:
        with replica:
            losses.append(scaled(replica.model))
    torch.stack(losses).sum().backward()
    engine.share_gradients()
    for optimizer in engine.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    engine.step([loss.detach() for loss in losses])


@pytest.mark.parametrize("copies", [False, True])
def test_a_backward_outside_the_block_is_warned_of_once(copies: bool, recwarn: pytest.WarningsRecorder) -> None:
    engine = make([knob()], copies=copies)
    for _ in range(3):
        train_outside(engine)
    (warning,) = (one for one in recwarn if "no backward pass ran inside `with replica:` in step 0" in str(one.message))
    assert warning.filename == __file__


@pytest.mark.parametrize("horizon", [0, 20])
def test_steps_with_a_backward_outside_the_block_are_left_out(horizon: int, recwarn: pytest.WarningsRecorder) -> None:
    """Counted as zeros they would make the slope small, and sure."""
    engine = make([knob(evidence=Contrast(horizon=horizon))], copies=True, window=24)
    for step in range(24):
        if step % 3:
            train(engine, step + 1)
        else:
            train_outside(engine)
    estimate = engine.history.windows[0].estimates["a"]
    assert estimate["slope"] == pytest.approx(24 * ONE_STEP * secant(), rel=1e-4)
    assert len(recwarn) == 1


def test_a_backward_inside_it_is_not(recwarn: pytest.WarningsRecorder) -> None:
    train(make([knob()]))
    assert not [one for one in recwarn if "no backward" in str(one.message)]


def secant(width: float = WIDTH) -> float:
    return math.sinh(width) / width


ONE_STEP = -RATE * float(AIM @ SLOPE) * SCALE  # d probe / d log a after one step


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
    model = Halves()
    engine = Engine(
        hdet.micro_batches(model, torch.optim.SGD(model.parameters(), lr=RATE), n=4),
        [knob(evidence=Contrast(horizon=horizon))],
        window=16,
        signal=Probe(lambda model, batch: batch * (AIM @ (model.w - model.other)), (1.0, 1.0)),
        total_steps=32,
        seed=1,
    )
    for until, names in ((16, trained), (32, then)):
        for name in ("w", "other"):
            getattr(model, name).requires_grad_(name in names.split())
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


def noisy(model: Any, step: int, index: int) -> Tensor:
    noise = torch.randn(3, generator=torch.Generator().manual_seed(97 * step + index))
    loss: Tensor = (model.a * SLOPE + noise) @ model.w
    return loss


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


def test_one_replica_is_compared_with_itself_over_steps() -> None:
    """Blocks of four steps: two windows of 16 make eight."""
    records = train(make([knob()], n=1, window=16, windows=4), loss=noisy)
    assert [record.estimates["a"]["t"] != 0.0 for record in records] == [False, True, False, True]


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


# -- bounds ---------------------------------------------------------------------------------------


class Regulariser(ModuleKnob):
    """`Vector.late`, said to act in training alone."""

    kind = "regulariser_for_tests"
    role = "late"
    space: Space = Arcsine()
    bounds: tuple[float, float] = (0.0, 0.9)

    def cells(self, model: nn.Module, pattern: str) -> Any:
        from hdet.hparams.binding import Attribute

        return {"late": Attribute(model, "late")}


def regulariser(evidence: Contrast | None = None, **options: Any) -> Regulariser:
    given = {"spread": TwoLevel(0.15), "controller": Hold(), **options}
    return Regulariser(evidence=evidence or Contrast(), **given)


def constant(model: Any, batch: float) -> Tensor:
    loss: Tensor = batch + 0.0 * model.w.sum()
    return loss


def explored_windows(
    engine: Engine, training: Callable[[int], float], of: Callable[[Any], float] = lambda model: model.late
) -> list[int]:
    """The windows in which a knob left its base, where the training loss of a step is `training`."""
    seen: list[float] = []
    base = of(engine.replicas[0].model)
    train(
        engine,
        watch=lambda model: seen.append(of(model)),
        report=lambda step, own: torch.tensor(training(step)),
    )
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


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_a_loss_divided_by_the_micro_batches_is_no_sign_of_overfitting(micro_batches: int) -> None:
    """And it is said, once, at the line of the loop."""
    engine = make([regulariser(Contrast(bound_from=0.5))], window=5, windows=6, probe=constant)
    with pytest.warns(UserWarning, match="not on one scale") as caught:
        assert explored_windows(engine, lambda step: 1.0 / micro_batches) == []
    assert [warning.filename for warning in caught] == [__file__]
    # What was found out is part of the state: the loop that goes on in mid-run explores nothing, and is told no more.
    again = make([regulariser(Contrast(bound_from=0.5))], window=5, windows=6, probe=constant)
    with pytest.warns(UserWarning, match="not on one scale"):
        train(again, 17, report=lambda step, own: torch.tensor(1.0 / micro_batches))
    resumed = make([regulariser(Contrast(bound_from=0.5))], window=5, windows=6, probe=constant)
    resumed.load_state_dict(again.state_dict())
    assert [collector.levels.other_scale for collector in resumed.cycle.collectors] == [True]


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


# -- what is refused ------------------------------------------------------------------------------


def test_local_gradients_are_refused() -> None:
    with pytest.raises(IdentifiabilityError, match="shared"):
        make([knob()], copies=True, gradients="local")


def test_knobs_of_the_update_are_refused() -> None:
    given = hdet.LearningRate(evidence=Contrast(), controller=Hold())
    with pytest.raises(IdentifiabilityError, match="acts on the update"):
        make([given])


@pytest.mark.parametrize("horizon", [0, 400])
def test_a_replica_that_did_not_run_is_named(horizon: int) -> None:
    """At whatever horizon: a step that was not seen would count as one without an effect."""
    engine = make([knob(evidence=Contrast(horizon=horizon))], n=4)
    with engine.replicas[0] as replica:
        scaled(replica.model).backward()
    engine.share_gradients()
    engine.optimizers[0].step()
    with pytest.raises(StepError, match=r"1 of 4 replicas .* in step 0 \(not 1, 2, 3\)"):
        engine.step([0.0] * 4)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("evidence", [None, Contrast(horizon=400), Contrast(), Contrast(paired=True)])
def test_a_loop_without_the_block_is_told_at_its_first_step(evidence: Contrast | None, copies: bool) -> None:
    """Though the regulariser would begin to explore only later, off its bound."""
    engine = make([regulariser(evidence or Contrast(horizon=400))], copies=copies)
    for replica in engine.replicas:
        scaled(replica.model).backward()
    engine.share_gradients()
    for optimizer in engine.optimizers:
        optimizer.step()
    with pytest.raises(StepError, match=r"0 of 4 replicas ran inside `with replica:` in step 0.*run forward and"):
        engine.step([0.0] * 4)


def test_a_pass_that_failed_was_none() -> None:
    engine = make([knob()])
    train(engine, 2)
    for replica in engine.replicas[1:]:
        with replica:
            scaled(replica.model).backward()
    with pytest.raises(ZeroDivisionError), engine.replicas[0]:
        raise ZeroDivisionError
    engine.share_gradients()
    with pytest.raises(StepError, match=r"3 of 4 replicas .* in step 2 \(not 0\)"):
        engine.step([0.0] * 4)


@pytest.mark.parametrize("horizon", [0, 20])
def test_a_short_accumulation_that_is_said_costs_its_block(horizon: int) -> None:
    engine = make([knob(evidence=Contrast(horizon=horizon))], window=24)
    for step in range(24):
        if step != 5:
            train(engine, step + 1)
            continue
        with engine.replicas[0] as replica:
            scaled(replica.model).backward()
        engine.share_gradients()
        engine.optimizers[0].zero_grad()
        engine.step([0.0] * 4, complete=False)
    estimate = engine.history.windows[0].estimates["a"]
    assert estimate["slope"] == pytest.approx(24 * ONE_STEP * secant(), rel=1e-4)


def test_a_knob_without_a_spread_asks_for_no_block() -> None:
    make([knob(spread=TwoLevel(0.0))]).step([0.0] * 4)


# -- resume ---------------------------------------------------------------------------------------


def small(step: int, own: Tensor) -> Tensor:
    """A training loss that is below any held-out one, but not from the start, which would show another scale."""
    return torch.tensor(1e6 if step < 10 else -1e6)


def weakened(model: Any, step: int, index: int) -> Tensor:
    return (1.0 - model.late) * noisy(model, step, index)


@pytest.mark.parametrize("horizon", [0, 30])
@pytest.mark.parametrize(
    ("n", "copies", "window", "stop"),
    [(1, False, 10, 13), (4, True, 5, 7), (4, False, 5, 10), (4, True, 5, 25), (4, False, 5, 32)],
)
def test_a_resume_is_the_same_run_bit_for_bit(n: int, copies: bool, window: int, stop: int, horizon: int) -> None:
    """In mid-block, with blocks saved from the windows before; a regulariser on its bound explores from a third on."""
    evidence = Contrast(refresh=3, horizon=horizon)

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def fresh() -> Engine:
        rule = Gated(0.1, gate=0.0, memory=0.7)
        knobs = [knob(controller=rule, evidence=evidence), on_bound(evidence=evidence), regulariser(evidence)]
        return make(knobs, **options)

    options: dict[str, Any] = {"n": n, "copies": copies, "window": window, "windows": 10, "optimizer": adam}
    whole = fresh()
    expected = train(whole, loss=weakened, report=small)
    assert any(record.estimates["a"]["t"] for record in expected)
    first = fresh()
    train(first, stop, loss=weakened, report=small)
    stored = io.BytesIO()
    torch.save(first.state_dict(), stored)
    stored.seek(0)
    second = fresh()
    second.load_state_dict(torch.load(stored, weights_only=True))
    records = train(second, loss=weakened, report=small)
    for one, other in zip(expected[-len(records) :], records, strict=True):
        assert (one.estimates, one.moves, one.bases, one.values) == (
            other.estimates,
            other.moves,
            other.bases,
            other.values,
        )
    assert torch.equal(whole.replicas[0].model.w, second.replicas[0].model.w)


# -- a knob without effect ------------------------------------------------------------------------


class Flat(nn.Module):
    """Sixteen weights whose gradients are whatever is put there, and a scalar nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(16))
        self.idle = 0.5


def placebo_ts(n: int, windows: int, shards: float = 0.0, design: Design | None = None, horizon: int = 0) -> np.ndarray:
    """The t of each window; with a horizon the evidence begins anew in each, or one would be nearly the next."""
    return np.array([estimate["t"] for estimate in placebo(n, windows, shards, design, horizon, anew=horizon > 0)])


def placebo(
    n: int, windows: int, shards: float = 0.0, design: Design | None = None, horizon: int = 0, anew: bool = False
) -> list[dict[str, Any]]:
    """Of a scalar nobody reads. Replica r's gradients have a mean of their own, `shards` times their noise."""
    blocks = 16 if horizon else 12
    window = blocks * max(1, 4 // n)
    model = Flat()
    engine = Engine(
        hdet.micro_batches(model, torch.optim.SGD(model.parameters(), lr=1e-3), n=n),
        [
            hdet.Scalar(
                "idle",
                path="idle",
                bounds=(0.01, 10.0),
                evidence=Contrast(refresh=10_000, horizon=horizon),
                controller=Hold(),
            )
        ],
        window=window,
        signal=Probe(lambda m, batch: m.w.sum() + batch, [0.0, 0.5]),
        total_steps=windows * window,
    )
    (collector,) = engine.cycle.collectors
    assert isinstance(collector, ContrastCollector)
    collector.design = design or collector.design  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(n)
    own = torch.randn(n, 16, generator=generator) * shards
    noise = torch.randn(windows * window, n, 16, generator=generator)
    zeros = [0.0] * n
    found = []
    for step in range(windows * window):
        model.w.grad = torch.zeros(16)
        for replica in engine.replicas:
            with replica:
                model.w.grad += noise[step, replica.index] + own[replica.index]
        engine.share_gradients()
        record = engine.step(zeros)
        if record is not None:
            found.append(record.estimates["idle"])
            if anew:
                collector.forget()
    return found


@STANDS_STILL
@pytest.mark.parametrize(
    ("n", "shards", "windows"),
    [(1, 0.0, 200), (8, 0.0, 250), (2, 3.0, 200), (4, 3.0, 250)],
)
def test_a_knob_without_effect_has_a_t_of_unit_spread(n: int, shards: float, windows: int) -> None:
    """Student's t with 11 degrees of freedom: sd 1.11, and |t| > 2 in 7 % of windows."""
    ts = placebo_ts(n, windows, shards)
    assert len(ts) == windows
    assert 0.8 < ts.std() < 1.3
    assert abs(ts.mean()) < 0.3
    assert 0.02 < (np.abs(ts) > 2.0).mean() < 0.13


@STANDS_STILL
@pytest.mark.parametrize(("n", "shards", "windows"), [(4, 3.0, 250), (1, 3.0, 150), (8, 3.0, 200)])
def test_traces_of_a_knob_without_effect_have_students_spread(n: int, shards: float, windows: int) -> None:
    """Of eight groups: 7 degrees of freedom, sd 1.18, and |t| > 2.365 in 5 % of windows."""
    ts = placebo_ts(n, windows, shards, horizon=400)
    assert len(ts) == windows
    assert 0.9 < ts.std() < 1.5
    assert abs(ts.mean()) < 0.3
    assert 0.01 < (np.abs(ts) > 2.365).mean() < 0.11


@STANDS_STILL
def test_windows_that_share_their_traces_are_not_taken_for_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 25 windows each remembers nearly all of the one before; kept apart by group, sums tell their own error."""
    monkeypatch.setattr(hdet.Scalar, "acts_in_eval", False)  # nothing of the probe's own is added
    rule = Gated(memory=0.8)
    taus: dict[str, list[float]] = {"by group": [], "independent": []}
    for windows in (placebo(n, 40, horizon=400) for n in (2, 4, 8)):
        for name, found in taus.items():
            state = rule.start()
            for told in windows:
                slopes = tuple(told["slopes"]) if name == "by group" else ()
                estimate = Estimate(told["slope"], stderr=told["stderr"], slopes=slopes)
                _, state = rule.step(state, estimate, Context())
                found.append(state.tau)
    sizes = {name: math.sqrt(np.mean(np.square(found))) for name, found in taus.items()}
    assert sizes["by group"] < 1.4
    assert sizes["independent"] > 1.5 * sizes["by group"]


@STANDS_STILL
def test_signs_that_stay_the_same_would_take_shards_for_an_effect() -> None:
    """The law above can fail: this is what it is there to see."""
    ts = placebo_ts(4, 50, 3.0, design=Fixed())
    assert (np.abs(ts) > 2.0).mean() > 0.9


class Stuck(Contrast):
    """The same signs in every step."""

    kind = "stuck_for_tests"

    def collect(self, scene: Any, knobs: Any) -> ContrastCollector:
        collector = super().collect(scene, knobs)
        collector.design = Fixed()  # type: ignore[assignment]
        return collector


class Biased(Contrast):
    """Every slope three standard errors too high: believable each time, and never right."""

    kind = "biased_for_tests"

    def collect(self, scene: Any, knobs: Any) -> ContrastCollector:
        collector = super().collect(scene, knobs)
        close = collector.close

        def raised(harvest: Any) -> dict[str, Estimate]:
            found = close(harvest)
            return {
                name: replace(e, slope=e.slope + 3 * e.stderr) if e.known and e.stderr < math.inf else e
                for name, e in found.items()
            }

        collector.close = raised  # type: ignore[method-assign]
        return collector


@pytest.mark.parametrize("evidence", [Stuck(), Biased()])
def test_the_conformance_suite_sees_an_effect_where_there_is_none(evidence: Contrast) -> None:
    (law,) = [law for law in hdet.testing.laws(evidence) if "placebo" in str(law)]
    with pytest.raises(hdet.testing.LawError, match="without effect"):
        law()
