"""The guard: a run that a rate too large has wrecked goes back and succeeds, and others are let alone."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import explicit_loop
import numpy as np
import pytest
import schedulefree
import torch
from torch import Tensor, nn

import hdet
from hdet import Engine, Rewind
from hdet.controllers import Calibrate, Controller, Gated, Hold, Newton
from hdet.engine.guard import Guard
from hdet.errors import ConfigError, DivergedError
from hdet.schedules import Cosine, Replay
from hdet.spreads import TwoLevel

STEPS = 240
WINDOW = 8
BLIND = Calibrate(rules=())
"""A rule that no evidence moves: what moves the rate is the guard."""

Batch = tuple[Tensor, Tensor]


def network(*middle: nn.Module, width: int = 16) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(4, width), nn.ReLU(), *middle, nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )


def draw(seed: int, count: int = 16, noise: float = 0.1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    y = x.sum(dim=1, keepdim=True).sin() + x[:, :1]
    return x, y + noise * torch.randn(count, 1, generator=generator)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def probe() -> hdet.Probe:
    return hdet.Probe(loss_of, [draw(-1 - j, 32) for j in range(8)])


def held_out_loss(model: nn.Module) -> float:
    with torch.no_grad():
        return float(torch.stack([loss_of(model.eval(), draw(-100 - j, 64)) for j in range(8)]).mean())


def rate(peak: float, **options: Any) -> hdet.LearningRate:
    return hdet.LearningRate(
        schedule=Cosine(peak, STEPS, warmup=0.5),
        bounds=(0.0, 100.0),
        controller=BLIND,
        evidence=hdet.evidence.Line(),
        **options,
    )


def make(
    peak: float = 0.01,
    *,
    guard: Guard | None = None,
    copies: bool = False,
    n: int = 1,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    knobs: list[hdet.Knob] | None = None,
    **options: Any,
) -> Engine:
    own = model if model is not None else network()
    optimizer = optimizer or torch.optim.AdamW(own.parameters(), lr=peak, weight_decay=0.0)
    settings: dict[str, Any] = {"window": WINDOW, "signal": probe(), "total_steps": STEPS, **options}
    return Engine(
        (hdet.replicate if copies else hdet.micro_batches)(own, optimizer, n=n),
        knobs if knobs is not None else [rate(peak)],
        guard=guard,
        **settings,
    )


def train(
    engine: Engine,
    until: int = STEPS,
    *,
    batch: Callable[[int, int], Batch] = lambda step, index: draw(1000 * step + index),
    before: Callable[[int], object] = lambda step: None,
    report: Callable[[int, Tensor], Tensor] = lambda step, own: own,
) -> list[hdet.history.WindowRecord]:
    for model, _ in engine.hosts:
        model.train()
    return explicit_loop.train(
        engine,
        until,
        loss=lambda model, step, index: loss_of(model, batch(step, index)),
        before=before,
        report=report,
    )


def wreck(engine: Engine) -> None:
    """Every prediction is off by 30."""
    for model, _ in engine.hosts:
        nn.init.constant_(model[-1].bias, 30.0)  # type: ignore[index]


def rewinds(records: list[hdet.history.WindowRecord]) -> list[tuple[int, int]]:
    """At which step the run went back, and to which."""
    return [(record.stop, fault["step"]) for record in records for fault in record.faults if fault["kind"] == "rewound"]


def reasons(records: list[hdet.history.WindowRecord]) -> set[str]:
    """Why the guard went back."""
    return {fault["because"] for record in records for fault in record.faults}


# -- a run that goes wrong ------------------------------------------------------------------------

TOO_LARGE = 2.0


@pytest.mark.parametrize(("copies", "n"), [(False, 1), (False, 2), (True, 2)])
def test_a_run_wrecked_by_its_rate_goes_back_and_succeeds(copies: bool, n: int) -> None:
    alone = make(TOO_LARGE, copies=copies, n=n)
    train(alone)
    guarded = make(TOO_LARGE, copies=copies, n=n, guard=Rewind())
    records = train(guarded)
    went = rewinds(records)
    assert went
    assert reasons(records) == {"standstill"}
    good = make(0.01)
    train(good)
    wrecked, saved, best = (held_out_loss(engine.hosts[0][0]) for engine in (alone, guarded, good))
    assert best < 0.2 * wrecked  # the unguarded run is lost
    assert saved < 0.4 * wrecked
    for stop, best_step in went:
        record = next(record for record in records if record.stop == stop)
        assert stop >= 1.5 * best_step
        assert record.moves["learning_rate"] < -1.0
        following = next(record for record in records if record.start == stop)
        at_best = next(record for record in records if record.stop == best_step)
        # A third of what had worked when the point was taken, at the schedule's next step.
        schedule = guarded.knobs[0].schedule
        since = schedule(following.stop - 1) / schedule(stop)
        assert following.bases["learning_rate"] == pytest.approx(at_best.bases["learning_rate"] / 3 * since)


@pytest.mark.filterwarnings("ignore:the probe's loss is not finite")
@pytest.mark.parametrize("factor", [1.0, math.inf, math.nan])
def test_a_held_out_loss_that_is_no_longer_finite_is_damage_too(factor: float) -> None:
    """As where half precision overflows: the worst damage is the one that no difference tells."""

    def judged(model: Any, batch: Batch) -> Tensor:
        loss = loss_of(model, batch)
        return loss * factor if loss > 100.0 else loss

    signal = hdet.Probe(judged, [draw(-1 - j, 32) for j in range(8)])
    engine = make(guard=Rewind(), signal=signal)
    records = train(engine, 120, before=lambda step: wreck(engine) if 40 <= step < 80 else None)
    (stop, point), *_ = rewinds(records)
    assert (stop <= 80, point) == (True, 40)


@pytest.mark.filterwarnings("ignore:the probe's loss is not finite")
@pytest.mark.parametrize("off", [1e30, 1e4])
@pytest.mark.parametrize(("n", "last"), [(1, 39), (2, 159)])
def test_a_window_whose_last_step_wrecks_the_model_is_no_point_to_go_back_to(off: float, n: int, last: int) -> None:
    """Its training loss was told before, and may be the lowest; the next windows set out from there."""
    engine = make(guard=Rewind(), n=n)

    def wreck_it(*_: object) -> None:
        if engine.step_count == last:
            nn.init.constant_(engine.hosts[0][0][-1].bias, off)  # type: ignore[index]

    engine.optimizers[0].register_step_post_hook(wreck_it)
    records = train(engine)
    ((stop, point),) = rewinds(records)
    assert (stop, point <= last - 7) == (last + 1, True)
    assert reasons(records) == {"wreck"}
    assert held_out_loss(engine.hosts[0][0]) < held_out_loss(network())


@pytest.mark.filterwarnings("ignore:the probe's loss is not finite")
@pytest.mark.parametrize("bad_batch", [False, True])
def test_where_the_first_window_ends_in_a_wreck_the_run_begins_anew(bad_batch: bool) -> None:
    """And not where the held-out batch is to blame."""
    batches = [draw(-1 - j, 32) for j in range(8)]
    if bad_batch:
        batches[3][1].fill_(math.nan)
    engine = make(guard=Rewind(), signal=hdet.Probe(loss_of, batches))

    def wreck_it(*_: object) -> None:
        if engine.step_count == 7 and not bad_batch:
            nn.init.constant_(engine.hosts[0][0][-1].bias, 1e30)  # type: ignore[index]

    engine.optimizers[0].register_step_post_hook(wreck_it)
    assert restarts(train(engine, 80)) == ([] if bad_batch else [(8, 0)])
    assert held_out_loss(engine.hosts[0][0]) < held_out_loss(network())


@pytest.mark.filterwarnings("ignore:the probe's loss is not finite")
@pytest.mark.parametrize("bad", [1, 8])
def test_a_point_that_a_few_sub_batches_show_to_be_wrecked_is_none_and_a_bad_batch_is_no_wreck(bad: int) -> None:
    """Of 8 sub-batches one is enough for the first; where the best point fares alike it is the batch."""
    wrecked = 0.0

    def judged(model: Any, batch: Batch) -> Tensor:
        return loss_of(model, batch) + batch[1].new_tensor(wrecked) * (model[-1].bias > 100.0 if bad == 1 else 1.0)

    def batches(window: int) -> list[Batch]:
        return [draw(-1 - j, 32) for j in range(8)]

    engine = make(guard=Rewind(), signal=hdet.Probe(judged, batches))
    records = train(engine, 80)

    def wreck_it(*_: object) -> None:
        if engine.step_count == 87:
            nn.init.constant_(engine.hosts[0][0][-1].bias, 200.0)  # type: ignore[index]

    engine.optimizers[0].register_step_post_hook(wreck_it)
    wrecked = 1e9
    records = train(engine, 88)
    assert bool(rewinds(records)) is (bad == 1)


class Followed(nn.Module):
    """A student, and a teacher that the loop moves: what it asks for beside the rest nobody could learn."""

    def __init__(self, trained_by_another: bool) -> None:
        super().__init__()
        self.student = network()
        self.target = nn.Parameter(torch.zeros(()), requires_grad=trained_by_another)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x) - self.target.detach() * (40.0 * x[:, 1:2]).sin()  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:the probe is too small")
@pytest.mark.parametrize("trained_by_another", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, schedulefree.AdamWScheduleFree])
def test_a_loss_that_rises_because_a_teacher_moves_is_no_damage(trained_by_another: bool, kind: Any) -> None:
    """Self-supervised losses begin low and rise; a run that went back for it learned next to nothing."""
    model = Followed(trained_by_another)
    optimizer = kind(model.student.parameters(), lr=0.01, weight_decay=0.0)
    getattr(optimizer, "train", lambda: None)()
    engine = make(model=model, optimizer=optimizer, guard=Rewind())

    def move(step: int) -> None:
        with torch.no_grad():
            model.target.fill_(0.012 * step)

    records = train(engine, before=move)
    losses = [record.losses[0] for record in records]
    assert losses.index(min(losses)) < 12  # type: ignore[type-var]
    assert rewinds(records) == []


class Consistent(Followed):
    """What the student says beside the teacher counts in part."""

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x) - 0.6 * self.target.detach()  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:the probe is too small")
def test_a_teacher_that_follows_into_the_wreck_excuses_nothing() -> None:
    """Beside it the best point's own weights are worse still, but the loss is far above what it has been."""
    model = Consistent(False)
    optimizer = torch.optim.AdamW(model.student.parameters(), lr=0.01, weight_decay=0.0)
    engine = make(model=model, optimizer=optimizer, guard=Rewind())

    def wreck_both(step: int) -> None:
        with torch.no_grad():
            model.target.fill_(10.0 if step >= 80 else 1e-3 * step)
            if step >= 80:
                model.student[-1].weight.zero_()  # type: ignore[union-attr, operator]
                model.student[-1].bias.fill_(10.0)  # type: ignore[union-attr, operator]

    ((stop, point), *_) = rewinds(train(engine, before=wreck_both))
    assert point <= 80 < stop


def test_a_run_that_explores_nothing_is_guarded_too() -> None:
    """Its point is in the state, and a run that goes on from there goes back to it."""
    engine, resumed = (make(guard=Rewind(), knobs=[]) for _ in range(2))
    train(engine, 40)
    resumed.load_state_dict(copy.deepcopy(engine.state_dict()))
    for own in (engine, resumed):
        records = train(own, 120, before=lambda step, own=own: wreck(own) if 40 <= step < 80 else None)
        (stop, point), *_ = rewinds(records)
        assert (stop <= 80, point) == (True, 40)


def test_what_is_kept_to_go_back_to_goes_with_the_run() -> None:
    engine = make(guard=Rewind(), signal=probe())
    train(engine)
    assert engine.state_dict()["watch"]["held"] is None
    assert engine.cycle.watch is not None
    assert engine.cycle.watch.points == []


def test_it_goes_back_to_the_best_window_and_no_further() -> None:
    """The mean training loss was lowest there."""
    engine = make(TOO_LARGE, guard=Rewind())
    records = train(engine)
    stop, best = rewinds(records)[0]
    (told,) = (record.reasons["learning_rate"] for record in records if record.stop == stop)
    assert told["guard"] == "rewound"
    before = [record for record in records if record.stop <= stop]
    losses = [sum(loss for loss in record.losses if loss is not None) for record in before]
    assert before[losses.index(min(losses))].stop == best


def test_what_is_put_back_is_the_point_bit_for_bit(assert_same: Any) -> None:
    """Weights, buffers (BatchNorm's) and the optimizer's state, in every copy; the step count goes on."""
    model = network(nn.BatchNorm1d(16))
    engine = make(model=model, copies=True, n=2, guard=Rewind(significance=0.01))
    best: list[Any] = []

    def state() -> list[Any]:
        return [copy.deepcopy([m.state_dict(), o.state_dict()["state"]]) for m, o in engine.hosts]

    train(engine, 16)
    best = state()
    assert best[0][0]["2.running_mean"].abs().sum() > 0
    for stop in range(24, 41, 8):
        (record,) = train(engine, stop, before=lambda step: wreck(engine), report=lambda step, own: own + 10.0)
        if rewinds([record]):
            break
    assert rewinds([record]) == [(24, 16)]
    assert engine.step_count == 24
    # As merged after the window, which leaves the first copy's BatchNorm and optimizer in force.
    assert_same(state()[0], best[0])
    for name, value in engine.hosts[1][0].state_dict().items():
        assert torch.equal(value, engine.hosts[0][0].state_dict()[name])


def test_after_a_rewind_there_is_time_to_do_better() -> None:
    """Patience counts from the rewind on: at 1.5 times its step at the earliest comes the next."""
    engine = make(guard=Rewind(patience=1.5, significance=0.01))
    train(engine, 16)

    records = train(engine, 120, before=lambda step: wreck(engine), report=lambda step, own: own + 10.0)
    assert [stop for stop, _ in rewinds(records)] == [24, 40, 64, 96]  # windows end at multiples of 8


def test_evidence_from_the_way_that_led_astray_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(guard=Rewind(significance=0.01))
    forgotten: list[int] = []
    monkeypatch.setattr(engine.cycle.collectors[0], "forget", lambda: forgotten.append(engine.step_count))
    train(engine, 16)
    wreck(engine)
    train(engine, 24, report=lambda step, own: own + 10.0)
    assert forgotten == [24]


def test_controllers_that_remember_begin_anew() -> None:
    """A knob of another kind stays where it is, and forgets."""
    gated = Gated(0.1, gate=0.0, memory=0.9)
    decay = hdet.WeightDecay(schedule=0.1, controller=gated, evidence=hdet.evidence.Analytic())
    engine = make(knobs=[rate(0.01), decay], guard=Rewind(significance=0.01))
    train(engine, 16)
    assert engine.knobs[1].state != gated.start()
    wreck(engine)
    train(engine, 24, report=lambda step, own: own + 10.0)
    assert engine.knobs[1].state == gated.start()
    assert engine.bases["learning_rate"] < 0.01


@pytest.mark.parametrize("guard", [None, Rewind()])
def test_where_all_replicas_became_non_finite_the_rate_retreats_too(guard: Guard | None) -> None:
    """From that of the window in which they did. Without a guard the run goes on as before."""
    engine = make(0.01, guard=guard)
    train(engine, 16)
    before, state = engine.bases["learning_rate"], engine.knobs[0].state
    (record,) = train(engine, 24, report=lambda step, own: own * math.nan)
    assert [fault["kind"] for fault in record.faults] == ["non_finite", "restored"]
    (knob,) = engine.knobs
    if guard is None:
        assert (record.moves["learning_rate"], knob.state) == (0.0, state)
        assert record.reasons == {}
        return
    assert record.reasons["learning_rate"] == {"guard": "restored"}
    worked = record.bases["learning_rate"]
    assert worked > before
    assert engine.bases["learning_rate"] == pytest.approx(worked / 3)


def test_where_buffers_alone_were_not_finite_no_rate_is_to_blame() -> None:
    """As where a batch that is not finite goes through BatchNorm, and the loop skips its step."""
    engine = make(0.01, guard=Rewind())
    engine.replicas[0].model.register_buffer("mean", torch.zeros(1))
    train(engine, 16)

    def poison(step: int, own: Tensor) -> Tensor:
        engine.replicas[0].model.mean.fill_(math.nan)  # type: ignore[operator, union-attr]
        return own

    (record,) = train(engine, 24, report=poison)
    assert [(fault["kind"], fault.get("where")) for fault in record.faults] == [
        ("non_finite", "buffers"),
        ("restored", None),
    ]
    assert record.moves["learning_rate"] == 0.0
    assert record.reasons == {}
    (record,) = train(engine, 32, report=poison)
    assert record.moves["learning_rate"] < -1.0, "twice on end it may be the rate: activations overflow too"
    with pytest.raises(
        DivergedError, match=r"buffers alone were not finite first.*test a batch before the forward pass"
    ):
        train(engine, 56, report=poison)


# -- first steps that were far too large ----------------------------------------------------------


def looking_ahead(
    peak: float, guard: Guard | None = None, controller: Controller | None = None, **options: Any
) -> Engine:
    """Windows of 8; the warm-up is looked ahead of for four of them."""
    knob = hdet.LearningRate(
        schedule=Cosine(peak, STEPS, warmup=0.5), bounds=(0.0, 1e4), controller=controller or Calibrate()
    )
    return make(peak, guard=guard, knobs=[knob], evidence=hdet.evidence.Line(), **options)


def restarts(records: list[hdet.history.WindowRecord]) -> list[tuple[int, int]]:
    return [
        (record.stop, fault["step"]) for record in records for fault in record.faults if fault["kind"] == "restarted"
    ]


def until_it_began_anew(engine: Engine) -> list[hdet.history.WindowRecord]:
    records = train(engine, WINDOW)
    while not restarts(records):
        records += train(engine, engine.step_count + WINDOW)
        assert engine.step_count <= 32, "looking ahead is over"
    return records


@pytest.mark.filterwarnings("ignore:the probe is too small")
@pytest.mark.parametrize(("copies", "n"), [(False, 1), (False, 2), (True, 2)])
def test_where_looking_ahead_brought_the_rate_down_far_the_run_begins_anew(
    copies: bool, n: int, assert_same: Any
) -> None:
    """From its first weights, optimizer and buffers, at a third of the rate it had come to; once."""
    model = network(nn.BatchNorm1d(16))
    first = copy.deepcopy(model.state_dict())
    engine = looking_ahead(10.0, Rewind(overshoot=1.3), model=model, copies=copies, n=n)
    records = until_it_began_anew(engine)
    assert restarts(records) == [(engine.step_count, 0)]
    assert reasons(records) == {"overshoot"}
    assert records[-1].reasons["learning_rate"]["guard"] == "restarted"
    lowered = [record.moves["learning_rate"] for record in records]
    lowered[-1] += math.log(3.0)
    assert sum(lowered) < -math.log(1.3) < sum(lowered[:-1])
    for own, optimizer in engine.hosts:
        assert_same(own.state_dict(), first)
        assert optimizer.state_dict()["state"] == {}
    rest = train(engine)
    assert restarts(rest) == []


def test_the_first_weights_are_those_of_the_first_step(assert_same: Any) -> None:
    """Whatever was loaded after the engine had been made."""
    engine = looking_ahead(10.0, Rewind(overshoot=1.3))
    ((model, _),) = engine.hosts
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    loaded = copy.deepcopy(model.state_dict())
    until_it_began_anew(engine)
    assert_same(model.state_dict(), loaded)


@pytest.mark.parametrize(
    "evidence",
    [hdet.evidence.Contrast(bound_from=0.0), hdet.evidence.MixedDifference(bound_from=0.0)],
    ids=["contrast", "mixed"],
)
def test_levels_near_a_bound_are_no_look_ahead(evidence: hdet.evidence.Evidence) -> None:
    """They lie off their base too, to the end of the run: the first weights would be kept as long, and come back."""
    engine = make(
        guard=Rewind(),
        model=network(hdet.nn.Dropout(1e-4)),
        knobs=[rate(0.01), hdet.Dropout(evidence=evidence, controller=Hold())],
        n=4,
        objective=hdet.Objective(loss_of, lambda window: [draw(500 + 8 * window + j) for j in range(8)]),
    )
    looked, later = train(engine, 6 * WINDOW)[1::4]
    assert looked.estimates["learning_rate"]["offset"] > 0.0 == later.estimates["learning_rate"]["offset"]
    assert later.estimates["dropout"]["offset"] > 0.0
    assert engine.cycle.watch is not None
    assert engine.cycle.watch.first is None


def test_nothing_is_left_of_the_run_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its best point nor evidence that was saved up."""
    engine = looking_ahead(10.0, Rewind(overshoot=1.3))
    forgotten: list[int] = []
    monkeypatch.setattr(engine.cycle.collectors[0], "forget", lambda: forgotten.append(engine.step_count))
    until_it_began_anew(engine)
    watch = engine.cycle.watch
    assert watch is not None
    assert forgotten == [engine.step_count]
    assert (watch.lowest, watch.bases, watch.first, watch.since) == (math.inf, {}, None, engine.step_count)
    train(engine, engine.step_count + WINDOW)
    assert watch.held.step == engine.step_count, "the next window's is the best so far"


@pytest.mark.parametrize("finished", [False, True])
def test_a_run_that_is_over_does_not_begin_anew(finished: bool) -> None:
    """It would end with weights that no step has been made with. (Newton listens to the end.)"""
    newton = Newton(0.6)
    stop = until_it_began_anew(looking_ahead(10.0, Rewind(overshoot=1.3), controller=newton))[-1].stop
    engine = looking_ahead(
        10.0, Rewind(overshoot=1.3), controller=newton, **({} if finished else {"total_steps": stop})
    )
    train(engine, stop - finished)
    if finished:
        engine.finish()
    assert engine.finished
    last = engine.history.windows[-1]
    assert last.moves["learning_rate"] < 0.0
    assert restarts(list(engine.history)) == []
    assert engine.hosts[0][1].state_dict()["state"]


def test_it_begins_anew_only_while_it_looks_ahead() -> None:
    """What brings the rate down later is another matter: the weights are worth something by then."""
    engine = looking_ahead(0.01, Rewind(overshoot=1.01))
    train(engine, 40)
    (knob,) = engine.knobs
    assert engine.cycle.watch is not None
    assert engine.cycle.watch.first is None
    harvest = hdet.evidence.Harvest(engine.cycle.window, np.array([1.0]), np.array([True]))
    assert engine.cycle.watch.look(harvest, engine.bases, {knob.name: -5.0}) is None


@pytest.mark.parametrize(
    ("losses", "valid", "mean"), [([1.0, 3.0], [True, True], 2.0), ([1.0, 3.0], [True, False], 1.0)]
)
def test_a_windows_loss_is_the_mean_over_sound_replicas(losses: list[float], valid: list[bool], mean: float) -> None:
    window = make().cycle.window
    assert hdet.evidence.Harvest(window, np.array(losses), np.array(valid)).loss == mean
    unreported = hdet.evidence.Harvest(window, np.array([1.0, math.nan]), np.array([True, True]))
    assert unreported.loss is None


def test_a_window_whose_loss_was_not_reported_is_not_the_best() -> None:
    engine = make(guard=Rewind())
    train(engine, 8)
    watch = engine.cycle.watch
    assert watch is not None
    before = watch.held.step
    unreported = hdet.evidence.Harvest(engine.cycle.window, np.array([math.nan]), np.array([True]))
    assert watch.look(unreported, engine.bases, {}) is None
    assert watch.held.step == before


@pytest.mark.parametrize(("peak", "overshoot"), [(0.003, 4.0), (10.0, None), (10.0, 1000.0)])
def test_where_it_did_not_the_run_goes_on(peak: float, overshoot: float | None) -> None:
    engine = looking_ahead(peak, Rewind(overshoot=overshoot))
    assert restarts(train(engine, 80)) == []


def test_it_counts_what_was_lowered_in_all() -> None:
    """What was raised again in between counts against it, and each knob is counted by itself."""
    watch = looking_ahead(0.01, Rewind(overshoot=math.exp(1.0))).cycle.watch
    assert watch is not None
    assert not watch._overshot({"one": -0.6, "two": 0.0})
    assert not watch._overshot({"one": 0.3, "two": -0.6})
    assert not watch._overshot({"one": -0.6, "two": -0.3})
    assert watch._overshot({"one": 0.0, "two": -0.2})


# -- runs that do not -----------------------------------------------------------------------------


def test_a_healthy_run_never_goes_back() -> None:
    """And is no other than without a guard."""
    guarded, alone = make(guard=Rewind()), make()
    records = train(guarded)
    train(alone)
    assert rewinds(records) == []
    for one, other in zip(guarded.hosts[0][0].parameters(), alone.hosts[0][0].parameters(), strict=True):
        assert torch.equal(one, other)


def few(step: int, index: int) -> Batch:
    """The same sixteen examples over and over, a good half of them noise."""
    return draw(5, 16, noise=1.0)


def test_a_run_that_overfits_never_goes_back() -> None:
    """Held-out loss becomes far worse than it was, and training loss goes on falling."""
    engine = make(guard=Rewind())
    first = train(engine, 80, batch=few)
    early = held_out_loss(engine.hosts[0][0])
    rest = train(engine, batch=few)
    assert rest[-1].losses[0] < 0.5 * first[-1].losses[0]  # type: ignore[operator]
    assert held_out_loss(engine.hosts[0][0]) > 1.1 * early
    assert rewinds(first + rest) == []


def test_where_no_loss_is_told_any_more_nothing_says_that_training_stands_still() -> None:
    engine = make(guard=Rewind())
    train(engine, 80, batch=few)
    records = explicit_loop.train(
        engine, loss=lambda model, step, index: loss_of(model, few(step, index)), tell=lambda step, losses: None
    )
    assert rewinds(records) == []


def test_a_run_whose_dropout_is_raised_never_goes_back() -> None:
    """Training loss jumps up for good, and held-out loss has nothing against it."""
    dropout = hdet.Dropout(
        schedule=Replay([0.0] * 100 + [0.4] * (STEPS - 100)), spread=TwoLevel(0.0), controller=Hold()
    )
    engine = make(
        model=network(hdet.nn.Dropout(0.0), width=48), knobs=[rate(0.005), dropout], guard=Rewind(patience=1.2)
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        records = train(engine, batch=few)
    losses = [record.losses[0] for record in records]
    assert min(losses[14:]) > min(losses[:12])  # type: ignore[type-var, operator]
    assert rewinds(records) == []


def test_what_the_users_own_schedule_wrote_is_not_taken_back() -> None:
    engine = make(TOO_LARGE, guard=Rewind())
    optimizer = engine.optimizers[0]

    def before(step: int) -> None:
        optimizer.param_groups[0]["eps"] *= 1.01

    records = train(engine, before=before)
    assert rewinds(records)
    assert optimizer.param_groups[0]["eps"] == pytest.approx(1e-8 * 1.01**STEPS, rel=1e-9)


# -- resume, and what is refused ------------------------------------------------------------------


@pytest.mark.parametrize("stop", [40, 101, 131, 200])
def test_a_resume_is_the_same_run_bit_for_bit(stop: int, assert_same: Any) -> None:
    whole = make(TOO_LARGE, guard=Rewind())
    records = train(whole)
    assert rewinds(records)
    first = make(TOO_LARGE, guard=Rewind())
    train(first, stop)
    stored = io.BytesIO()
    torch.save(first.state_dict(), stored)
    stored.seek(0)
    second = make(TOO_LARGE, guard=Rewind())
    second.load_state_dict(torch.load(stored, weights_only=True))
    rest = train(second)
    assert rewinds(rest) == [each for each in rewinds(records) if each[0] > stop]
    assert_same(second.hosts[0][0].state_dict(), whole.hosts[0][0].state_dict())
    assert_same(second.cycle.watch.state_dict(), whole.cycle.watch.state_dict())  # type: ignore[union-attr]


@pytest.mark.parametrize("stop", [4, 12, 20, 28, 40])
def test_a_resume_before_or_after_a_new_start_is_the_same_run_bit_for_bit(stop: int, assert_same: Any) -> None:
    whole = looking_ahead(10.0, Rewind(overshoot=2.0))
    records = train(whole, 80)
    assert restarts(records)
    first = looking_ahead(10.0, Rewind(overshoot=2.0))
    train(first, stop)
    second = looking_ahead(10.0, Rewind(overshoot=2.0), model=network())
    with torch.no_grad():
        second.hosts[0][0][0].weight.add_(1.0)  # type: ignore[operator, index, union-attr]
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    rest = train(second, 80)
    assert restarts(rest) == [each for each in restarts(records) if each[0] > stop]
    assert_same(second.hosts[0][0].state_dict(), whole.hosts[0][0].state_dict())
    assert_same(second.cycle.watch.state_dict(), whole.cycle.watch.state_dict())  # type: ignore[union-attr]


@pytest.mark.parametrize("signal", [None, hdet.signals.TrainingLoss()])
def test_without_a_probe_it_is_refused(signal: Any) -> None:
    with pytest.raises(ConfigError, match=r"guard=Rewind\(\) compares the held-out loss.*signal=hdet\.Probe"):
        make(guard=Rewind(), signal=signal, knobs=[])


@pytest.mark.parametrize("guard", [True, "rewind", Rewind, 1.5])
def test_what_is_no_guard_is_refused(guard: Any) -> None:
    with pytest.raises(ConfigError, match="guard must be of type Guard"):
        make(guard=guard)


@pytest.mark.parametrize(
    ("field", "value"), [("patience", 1.0), ("significance", 0.0), ("overshoot", 1.0), ("keep", "disk")]
)
def test_fields_are_bounded(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        Rewind(**{field: value})


@pytest.mark.parametrize("keep", ["host", "device"])
def test_a_guard_is_declared_in_plain_words(keep: Any) -> None:
    guard = Rewind(patience=2.0, keep=keep)
    assert Guard.from_dict(guard.to_dict()) == guard
