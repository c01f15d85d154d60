"""The cycle: what is in force when, what is merged when, and that nothing else changes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer

import hdet
from hdet import Engine
from hdet.contrib import Geometric
from hdet.controllers import Context, Controller, Estimate, Hold
from hdet.controllers.state import NoState
from hdet.designs import LatinHypercube
from hdet.errors import StepError
from hdet.merges import Mean
from hdet.schedules import FromCallable, OneCycle, Replay
from hdet.spreads import OneSided, Symmetric, TwoLevel

STEPS = 30

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
}
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


@hdet.spec.register
class Push(Controller):
    """Moves by the same amount, whatever the evidence."""

    kind = "push"
    move: float = 0.1

    def start(self) -> NoState:
        return NoState()

    def step(self, state: NoState, estimate: Estimate, context: Context) -> tuple[float, NoState]:
        return self.move, state


def still(max_lr: float = 0.05) -> list[hdet.Knob]:
    """A learning rate on a schedule, and a decay, which are watched but never moved apart or along."""
    schedule = OneCycle(max_lr, total_steps=STEPS)
    return [
        hdet.LearningRate(schedule=schedule, spread=TwoLevel(0), controller=Hold()),
        hdet.WeightDecay(schedule=1e-3, spread=TwoLevel(0), controller=Hold()),
    ]


def plain(
    problem: Any, model: nn.Module, optimizer: Optimizer, n: int, *, same_batch: bool = False, max_lr: float = 0.05
) -> None:
    """Training without hdet: mean gradients of n batches, torch's scheduler."""
    for group in optimizer.param_groups:
        group["weight_decay"] = 1e-3
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr, total_steps=STEPS, cycle_momentum=False)
    parameters = list(model.parameters())
    for step in range(STEPS):
        own = []
        for index in range(n):
            problem.loss(model, problem.batch(step, 0 if same_batch else index)).backward()
            own.append([p.grad for p in parameters])
            for p in parameters:
                p.grad = None
        for k, p in enumerate(parameters):
            first = own[0][k]
            p.grad = first - sum((first - other[k] for other in own[1:]), torch.zeros(())) * (1.0 / n)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


# -- 1: spread 0 is plain training ----------------------------------------------------------------


@each_optimizer
@pytest.mark.parametrize("n", [1, 3, 4])
def test_spread_0_is_plain_training_bit_for_bit(
    make: Any, n: int, problem: Any, train: Any, assert_same: Any, assert_alike: Any
) -> None:
    model = problem.model()
    optimizer = make(model.parameters())
    reference = copy.deepcopy(model)
    engine = Engine(hdet.replicate(model, optimizer, n=n), still(), window=7)
    train(engine)
    own = make(reference.parameters())
    plain(problem, reference, own, n)
    assert engine.finished
    assert len(engine.history) == 5
    assert_same(model.state_dict(), reference.state_dict())
    assert_same(optimizer.state_dict()["state"], own.state_dict()["state"])
    assert_alike(engine)


@each_optimizer
@pytest.mark.parametrize("n", [1, 3])
def test_local_gradients_on_the_same_batches_are_plain_training(
    make: Any, n: int, problem: Any, train: Any, assert_same: Any, assert_alike: Any
) -> None:
    model = problem.model()
    reference = copy.deepcopy(model)
    engine = Engine(hdet.replicate(model, make(model.parameters()), n=n), still(), window=7, gradients="local")
    train(engine, batch=lambda step, index: problem.batch(step, 0))
    plain(problem, reference, make(reference.parameters()), 1)
    assert_same(model.state_dict(), reference.state_dict())
    assert_alike(engine)


def test_a_probe_changes_nothing(problem: Any, train: Any, assert_same: Any) -> None:
    """Dropout draws from the global generator: evaluating the probe in between must not shift it."""
    results = []
    for signal in (hdet.signals.TrainingLoss(), problem.probe(), problem.probe(at="average")):
        model = problem.model(nn.BatchNorm1d(6), nn.Dropout(0.3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        engine = Engine(hdet.replicate(model, optimizer, n=2), still(), window=7, signal=signal)
        torch.manual_seed(5)
        train(engine)
        results.append(model.state_dict())
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


def test_spread_0_is_plain_training_with_dropout(problem: Any, train: Any, assert_same: Any) -> None:
    model = problem.model(nn.BatchNorm1d(6), nn.Dropout(0.3))
    reference = copy.deepcopy(model)
    make = OPTIMIZERS["adamw"]
    knobs = [*still(), hdet.Dropout(spread=TwoLevel(0), controller=Hold())]
    engine = Engine(hdet.replicate(model, make(model.parameters()), n=1), knobs, window=7)
    torch.manual_seed(5)
    train(engine)
    torch.manual_seed(5)
    plain(problem, reference, make(reference.parameters()), 1)
    assert_same(model.state_dict(), reference.state_dict())


@pytest.mark.parametrize("n", [1, 3])
def test_counterfactual_evidence_looks_and_does_not_touch(n: int, problem: Any, train: Any, assert_same: Any) -> None:
    """Lines and directions are probed in the model's own memory: it must come back exactly."""
    model = problem.model(nn.LayerNorm(6))
    reference = copy.deepcopy(model)
    make = OPTIMIZERS["adamw"]
    schedule = OneCycle(0.05, total_steps=STEPS)
    knobs = [
        hdet.LearningRate(schedule=schedule, evidence=hdet.evidence.Line(), controller=Hold()),
        hdet.WeightDecay(schedule=1e-3, evidence=hdet.evidence.Analytic(), controller=Hold()),
    ]
    replicas = hdet.replicate(model, make(model.parameters()), n=n)
    engine = Engine(replicas, knobs, window=7, signal=problem.probe())
    records = train(engine)
    plain(problem, reference, make(reference.parameters()), n)
    assert_same(model.state_dict(), reference.state_dict())
    assert all(record.estimates["learning_rate"]["t"] != 0.0 for record in records)


# -- 3: levels and bounds -------------------------------------------------------------------------


def values_in_force(engine: Engine, knob: int) -> list[float]:
    return [float(binding.read()) for binding in engine.knobs[knob].bindings]


SPREADS = st.sampled_from([TwoLevel, Symmetric, Geometric])


@settings(max_examples=40)
@given(
    spread=SPREADS,
    width=st.floats(1e-6, 2.0),
    n=st.integers(2, 5),
    base=st.floats(1e-4, 1.0),
    head=st.floats(1e-3, 3.0),
    foot=st.floats(1e-3, 3.0),
    tensor=st.booleans(),
    push=st.sampled_from([-0.7, 0.0, 0.7]),
)
def test_levels_sum_to_zero_and_no_value_leaves_its_bounds(
    spread: Any, width: float, n: int, base: float, head: float, foot: float, tensor: bool, push: float
) -> None:
    """At every step of a schedule that rises and falls, float32 learning rates included."""
    bounds = (base * np.exp(-foot), base * np.exp(head))
    schedule = Replay(tuple(np.linspace(bounds[0], bounds[1], 4)) * 2)
    model = nn.Linear(1, 1)
    lr: Any = torch.tensor(base) if tensor else base
    knob = hdet.LearningRate(schedule=schedule, spread=spread(width), bounds=bounds, controller=Push(move=push))
    engine = Engine(hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=lr), n=n), [knob], window=3)
    space = knob.space
    for _ in range(8):
        step = engine.step_count
        bound, now = engine.knobs[0], engine.knobs[0].base(step)
        levels = bound.reach(now) * bound.levels
        assert abs(levels.sum()) <= n * np.spacing(width)
        in_force = values_in_force(engine, 0)
        assert all(bounds[0] <= value <= bounds[1] for value in in_force)
        assert bounds[0] <= now <= bounds[1]
        shifts = [space.difference(value, now) for value in in_force]
        np.testing.assert_allclose(shifts, levels, atol=2e-6 if tensor else 1e-9)
        engine.step([0.0] * n)


def test_one_sided_levels_never_cross_the_base(problem: Any) -> None:
    model = problem.model(nn.Dropout(0.0))
    knob = hdet.Dropout(spread=OneSided(0.2), bounds=(0.0, 0.03))
    engine = Engine(
        hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=4),
        [knob],
        gradients="local",
        signal=problem.probe(),
    )
    # Unbounded, half of them would be at sin^2(0.2) = 0.039.
    assert sorted(values_in_force(engine, 0)) == [0.0, 0.0, pytest.approx(0.03), pytest.approx(0.03)]
    assert max(values_in_force(engine, 0)) <= 0.03


# -- 4: the global generators ---------------------------------------------------------------------


def test_no_global_generator_is_touched(problem: Any, train: Any, tmp_path: Any) -> None:
    """Construction, whole windows with every kind of work at their ends, saving, resuming and finishing."""

    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())

    torch.manual_seed(1)
    before = states()
    model = problem.model(nn.BatchNorm1d(6))  # seeded, and gives the state back
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    knobs = [
        hdet.LearningRate(spread=Symmetric(0.1), evidence=hdet.evidence.Divergent(design=LatinHypercube())),
        hdet.WeightDecay(spread=TwoLevel(0.5)),
    ]
    engine = Engine(
        hdet.replicate(model, optimizer, n=4), knobs, window=5, signal=problem.probe(), history=tmp_path / "h.jsonl"
    )
    train(engine, 12)
    engine.load_state_dict(engine.state_dict())
    engine.finish()
    assert len(engine.history) == 3
    assert states() == before


def test_designs_depend_on_the_seed_and_not_on_the_generators(problem: Any) -> None:
    def levels(seed: int) -> list[list[float]]:
        model = problem.model()
        torch.manual_seed(random.randrange(1000))
        replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=8)
        engine = Engine(replicas, [hdet.LearningRate(spread=Symmetric(0.1))], window=1, seed=seed)
        seen = []
        for _ in range(5):
            seen.append(engine.knobs[0].levels.tolist())
            engine.step([0.0] * 8)
        return seen

    assert levels(3) == levels(3)
    assert levels(3) != levels(4)
    assert len({tuple(row) for row in levels(3)}) > 1


# -- 8: what is merged when -----------------------------------------------------------------------


def explored(problem: Any, n: int = 4, **options: Any) -> Engine:
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    knob = hdet.LearningRate(spread=Symmetric(0.5), controller=Hold())
    return Engine(hdet.replicate(model, optimizer, n=n), [knob], **{"window": 5, **options})


def test_nothing_is_merged_before_the_first_window_ends(problem: Any, train: Any, assert_alike: Any) -> None:
    engine = explored(problem, total_steps=20, gradients="local")
    alone = [copy.deepcopy((replica.model, replica.optimizer)) for replica in engine.replicas]
    rates = engine.knobs[0].values(0, range(4))
    train(engine, 4)
    for index, (model, optimizer) in enumerate(alone):
        assert optimizer.param_groups[0]["lr"] == rates[index]
        for step in range(5):
            problem.loss(model, problem.batch(step, index)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                for p, q in zip(model.parameters(), engine.replicas[index].model.parameters(), strict=True):
                    assert torch.equal(p, q)
    assert len({replica.model[0].weight.sum().item() for replica in engine.replicas}) == 4
    train(engine, 5)
    assert_alike(engine)
    for position, merged in enumerate(engine.replicas[0].model.parameters()):
        members = torch.stack([list(model.parameters())[position].detach() for model, _ in alone])
        torch.testing.assert_close(merged.detach(), members.mean(dim=0))
    momenta = [optimizer.state_dict()["state"][0]["momentum_buffer"] for _, optimizer in alone]
    torch.testing.assert_close(
        engine.optimizers[2].state_dict()["state"][0]["momentum_buffer"], torch.stack(momenta).mean(dim=0)
    )


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_after_the_last_step_all_replicas_are_equal_and_at_the_base(
    gradients: Any, problem: Any, train: Any, assert_alike: Any
) -> None:
    engine = explored(problem, total_steps=13, gradients=gradients)
    records = train(engine)
    assert [(record.start, record.stop, record.merged) for record in records] == [
        (0, 5, True),
        (5, 10, True),
        (10, 13, True),
    ]
    assert engine.finished
    assert engine.finish() is None
    assert_alike(engine)
    assert {optimizer.param_groups[0]["lr"] for optimizer in engine.optimizers} == {0.05}


def test_finish_merges_the_window_under_way(problem: Any, train: Any, assert_alike: Any) -> None:
    engine = explored(problem)
    train(engine, 7)
    record = engine.finish()
    assert record is not None
    assert (record.start, record.stop, record.merged) == (5, 7, True)
    assert engine.finished
    assert engine.step_count == 7
    assert_alike(engine)
    assert {optimizer.param_groups[0]["lr"] for optimizer in engine.optimizers} == {0.05}
    assert engine.finish() is None
    with pytest.raises(StepError, match="over after 7 steps"):
        engine.step([0.0] * 4)


def test_finish_between_windows_only_ends_exploration(problem: Any, train: Any, assert_alike: Any) -> None:
    engine = explored(problem)
    train(engine, 5)
    assert engine.finish() is None
    assert engine.finished
    assert len(engine.history) == 1
    assert_alike(engine)
    assert {optimizer.param_groups[0]["lr"] for optimizer in engine.optimizers} == {0.05}


def test_merging_may_keep_or_reset_optimizer_state(problem: Any, train: Any) -> None:
    def momenta(merge: Any) -> list[Any]:
        engine = explored(problem, merge=merge, total_steps=20)
        train(engine, 5)
        return [optimizer.state_dict()["state"] for optimizer in engine.optimizers]

    average, keep, reset = momenta(None), momenta(Mean("keep")), momenta(Mean("reset"))
    assert all(torch.equal(state[0]["momentum_buffer"], average[0][0]["momentum_buffer"]) for state in average)
    # Shared gradients and momentum: the buffers are alike although the weights were not.
    assert all(torch.equal(state[0]["momentum_buffer"], keep[0][0]["momentum_buffer"]) for state in keep)
    assert reset == [{}] * 4


def test_window_boundaries_follow_the_rule(problem: Any, train: Any) -> None:
    engine = explored(problem, window=hdet.windows.GrowingWindow(minimum=4, fraction=0.5), total_steps=40)
    records = train(engine)
    assert [(record.start, record.stop) for record in records] == [
        (0, 4),
        (4, 8),
        (8, 12),
        (12, 18),
        (18, 27),
        (27, 40),
    ]


# -- 9: authority and bounds of bases -------------------------------------------------------------


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_base_never_goes_beyond_its_authority(sign: int, problem: Any, train: Any) -> None:
    model = problem.model()
    knob = hdet.LearningRate(spread=TwoLevel(0.1), controller=Push(move=0.3 * sign), authority=0.5)
    replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.01), n=2)
    engine = Engine(replicas, [knob], window=1)
    moves = [train(engine, step + 1)[0].moves["learning_rate"] for step in range(4)]
    assert moves == pytest.approx([0.3 * sign, 0.2 * sign, 0.0, 0.0])
    assert engine.knobs[0].shift == 0.5 * sign
    assert engine.bases["learning_rate"] == pytest.approx(0.01 * np.exp(0.5 * sign))


def test_a_base_that_reaches_a_bound_turns_back_at_once(problem: Any, train: Any) -> None:
    """The shift does not wind up beyond the bound."""
    model = problem.model()
    knob = hdet.LearningRate(bounds=(1e-3, 0.02), controller=Push(move=1.0))
    replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.01), n=2)
    engine = Engine(replicas, [knob], window=1)
    train(engine, 3)
    assert engine.bases["learning_rate"] == pytest.approx(0.02)
    assert engine.bases["learning_rate"] <= 0.02
    assert engine.knobs[0].shift == pytest.approx(np.log(2))


# -- the face -------------------------------------------------------------------------------------


def test_values_on_record_are_those_that_were_in_force(problem: Any, train: Any) -> None:
    engine = explored(problem, total_steps=10)
    seen: list[list[float]] = []
    records = train(engine, after_update=lambda step: seen.append(values_in_force(engine, 0)))
    assert records[0].values["learning_rate"] == seen[4]
    assert records[1].values["learning_rate"] == seen[9]
    assert records[1].bases == {"learning_rate": 0.05}
    assert [record.window for record in engine.history] == [0, 1]
    assert set(records[0].estimates["learning_rate"]) >= {"slope", "stderr", "t"}


@pytest.mark.parametrize("merge", [Mean("average"), Mean("keep")], ids=["average", "keep"])
def test_with_an_odd_number_of_replicas_the_one_at_the_base_is_at_the_base(
    merge: Any, problem: Any, train: Any
) -> None:
    """Its value does not change from window to window, but the merge may have written another."""
    model = problem.model()
    knob = hdet.LearningRate(spread=TwoLevel(0.5), controller=Hold())
    replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.05), n=3)
    engine = Engine(replicas, [knob], window=2, merge=merge, total_steps=20)
    for step in range(19):
        train(engine, step + 1)
        assert values_in_force(engine, 0) == engine.knobs[0].values(engine.step_count, range(3))


def test_the_loss_on_record_is_the_window_mean(problem: Any) -> None:
    engine = explored(problem)
    for step in range(5):
        record = engine.step([torch.tensor(float(step + index)) for index in range(4)])
    assert record is not None
    assert record.losses == [2.0, 3.0, 4.0, 5.0]
    assert record.loss == 3.5
    assert record.first_loss == 1.5


@pytest.mark.parametrize("window", [7, 64, 150])
def test_the_first_loss_on_record_is_that_of_the_first_step(window: int, problem: Any) -> None:
    engine = explored(problem, window=window, total_steps=2 * window)
    records = []
    for step in range(2 * window):
        told = None if step == 0 else [torch.tensor(float(step + index)) for index in range(4)]
        records.append(engine.step(told))
    assert [record.first_loss for record in records if record is not None] == [2.5, None]


@pytest.mark.parametrize("give", ["tensor", "floats", "tuple", "shape_1"])
def test_losses_come_in_several_shapes(give: str, problem: Any) -> None:
    engine = explored(problem, window=1)
    values = [1.0, 2.0, 3.0, 4.0]
    losses: Any = {
        "tensor": torch.tensor(values, requires_grad=True),
        "floats": values,
        "tuple": tuple(torch.tensor(v, requires_grad=True) for v in values),
        "shape_1": [torch.tensor([v], dtype=torch.float64) for v in values],
    }[give]
    record = engine.step(losses)
    assert record is not None
    assert record.losses == values


def test_without_losses_replicas_converge_and_no_base_moves(problem: Any, train: Any, assert_alike: Any) -> None:
    engine = explored(problem, total_steps=10)
    records = train(engine, report=lambda step, losses: None)
    assert [record.losses for record in records] == [[None] * 4] * 2
    assert all(record.faults == [] and record.merged for record in records)
    assert records[0].estimates["learning_rate"]["t"] == 0.0
    assert_alike(engine)


def test_no_knobs_at_all_is_local_sgd(problem: Any, train: Any, assert_alike: Any) -> None:
    model = problem.model()
    replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.05), n=3)
    engine = Engine(replicas, [], window=4, gradients="local", total_steps=8)
    records = train(engine)
    assert [record.estimates for record in records] == [{}, {}]
    assert_alike(engine)


def test_a_learning_rate_far_too_low_is_raised(problem: Any, train: Any) -> None:
    model = problem.model()
    replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=1e-3), n=4)
    knob = hdet.LearningRate(spread=TwoLevel(0.3))
    engine = Engine(replicas, [knob], window=5, signal=problem.probe(), total_steps=60)
    train(engine)
    assert engine.bases["learning_rate"] > 5e-3


def test_reapply_puts_values_back_in_force(problem: Any) -> None:
    engine = explored(problem)
    before = values_in_force(engine, 0)
    for optimizer in engine.optimizers:
        optimizer.param_groups[0]["lr"] = 1.0
    engine.reapply()
    assert values_in_force(engine, 0) == before


def test_at_base_every_replica_has_the_base(problem: Any) -> None:
    engine = explored(problem)
    before = values_in_force(engine, 0)
    with engine.at_base():
        assert values_in_force(engine, 0) == [0.05] * 4
    assert values_in_force(engine, 0) == before


def test_a_schedule_without_end_may_start_at_zero(problem: Any) -> None:
    model = problem.model()
    replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=2)
    knob = hdet.LearningRate(schedule=FromCallable("math:log1p"), controller=Push(move=0.2))
    engine = Engine(replicas, [knob], window=3)
    for _ in range(6):
        engine.step([1.0, 1.0])
    assert engine.bases["learning_rate"] == pytest.approx(np.log1p(6) * np.exp(0.4))
    assert engine.knobs[0].peak == pytest.approx(np.log1p(5)), "the highest so far; what comes next may be a guess"


@hdet.spec.register
class Witness(Hold):
    """Keeps every context it is asked in."""

    kind = "witness"
    seen: ClassVar[list[Context]] = []

    def step(self, state: NoState, estimate: Estimate, context: Context) -> tuple[float, NoState]:
        self.seen.append(context)
        return super().step(state, estimate, context)


def test_a_controller_is_told_how_far_decay_had_been_moved(problem: Any, train: Any) -> None:
    """Either way, of two knobs the farther, and as it was in force in the window."""
    Witness.seen.clear()
    model = problem.model()
    groups = [{"params": [p], "weight_decay": 0.1} for p in model.parameters()]
    decays = [
        hdet.WeightDecay(name=f"decay {index}", groups=[index], spread=TwoLevel(0), controller=Push(move=move))
        for index, move in enumerate((-0.3, 0.1))
    ]
    rate = hdet.LearningRate(spread=TwoLevel(0), controller=Witness())
    engine = Engine(
        hdet.replicate(model, torch.optim.AdamW(groups, lr=0.01), n=2), [*decays, rate], window=7, total_steps=STEPS
    )
    train(engine)
    assert [context.decay_shift for context in Witness.seen] == pytest.approx([0.0, 0.3, 0.6, 0.9, 1.2])
