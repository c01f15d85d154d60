"""Whatever people train with: every optimizer of torch, groups, tensors, precision, normalisation, ties."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import prodigyopt
import pytest
import schedulefree
import torch
from torch import nn
from torch.optim import Optimizer

import hdet
from hdet import Engine
from hdet.controllers import Hold
from hdet.errors import StepError
from hdet.replicas.in_process import Copies
from hdet.schedules import Cosine, OneCycle
from hdet.spreads import TwoLevel

TORCH = torch.optim

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adadelta": lambda p: TORCH.Adadelta(p, lr=0.5),
    "adagrad": lambda p: TORCH.Adagrad(p, lr=0.05),
    "adam": lambda p: TORCH.Adam(p, lr=0.01, amsgrad=True),
    "adam_foreach": lambda p: TORCH.Adam(p, lr=0.01, foreach=True),
    "adam_fused": lambda p: TORCH.Adam(p, lr=0.01, fused=True),
    "adamw_fused_tensor": lambda p: TORCH.AdamW(p, lr=torch.tensor(0.01), fused=True),
    "adamw_tensor": lambda p: TORCH.AdamW(p, lr=torch.tensor(0.01)),
    "adamw_float64_tensor": lambda p: TORCH.AdamW(p, lr=torch.tensor(0.01, dtype=torch.float64)),
    "adamax": lambda p: TORCH.Adamax(p, lr=0.01),
    "adafactor": lambda p: TORCH.Adafactor(p, lr=0.01),
    "asgd": lambda p: TORCH.ASGD(p, lr=0.01),
    "chained": lambda p: hdet.ChainedOptimizer(
        TORCH.SGD(itertools.islice(p, 2), lr=0.05, momentum=0.9), TORCH.RMSprop(p, lr=0.01)
    ),
    "nadam": lambda p: TORCH.NAdam(p, lr=0.01, decoupled_weight_decay=True),
    "prodigy": lambda p: prodigyopt.Prodigy(p, lr=1.0),
    "radam": lambda p: TORCH.RAdam(p, lr=0.01),
    "rmsprop": lambda p: TORCH.RMSprop(p, lr=0.01),
    "rprop": lambda p: TORCH.Rprop(p, lr=0.01),
    "sgd_foreach": lambda p: TORCH.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "sgd_fused": lambda p: TORCH.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "sgd_tensor": lambda p: TORCH.SGD(p, lr=torch.tensor(0.05)),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_any_optimizer_is_explored_merged_and_resumed(
    make: Any, problem: Any, train: Any, assert_alike: Any, assert_same: Any
) -> None:
    """It learns, replicas come apart and together again, and half a window's state brings the run back."""

    def build() -> Engine:
        model = problem.model()
        knob = hdet.LearningRate(spread=TwoLevel(0.2))
        return Engine(hdet.replicate(model, make(model.parameters()), n=4), [knob], window=5, total_steps=20)

    engine = build()
    train(engine, 2)  # Rprop reads its rate only once
    assert len({replica.model[0].weight.sum().item() for replica in engine.replicas}) == 2
    train(engine, 8)
    in_force = [float(optimizer.param_groups[0]["lr"]) for optimizer in engine.optimizers]
    assert in_force == pytest.approx(engine.knobs[0].values(8, range(4)))
    state = copy.deepcopy(engine.state_dict())
    train(engine)
    assert_alike(engine)
    states = [optimizer.state_dict()["state"] for optimizer in engine.optimizers]
    for other in states[1:]:
        assert_same(other, states[0])
    losses = [record.loss for record in engine.history]
    assert min(losses) < losses[0]
    assert math.isfinite(losses[-1])
    resumed = build()
    resumed.load_state_dict(state)
    train(resumed)
    assert_same(resumed.replicas[0].model.state_dict(), engine.replicas[0].model.state_dict())


def test_tensor_learning_rates_stay_the_same_tensors(problem: Any, train: Any) -> None:
    """A captured graph or a compiled step holds on to them."""
    model = problem.model()
    optimizer = TORCH.AdamW(model.parameters(), lr=torch.tensor(0.01))
    engine = Engine(hdet.replicate(model, optimizer, n=2), [hdet.LearningRate()], window=3)
    held = [o.param_groups[0]["lr"] for o in engine.optimizers]
    assert held[0] is not held[1]
    train(engine, 7)
    assert all(o.param_groups[0]["lr"] is lr for o, lr in zip(engine.optimizers, held, strict=True))


def grouped(problem: Any, lr: Any = 0.01) -> tuple[nn.Module, Optimizer]:
    model = problem.model()
    groups = [
        {"params": model[0].parameters(), "name": "first", "weight_decay": 0.1},
        {"params": model[2].parameters(), "name": "last", "weight_decay": 0.0},
    ]
    return model, TORCH.AdamW(groups, lr=lr)


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["float", "tensor"])
def test_parameter_groups_are_explored_one_by_one(lr: Any, problem: Any, train: Any) -> None:
    """With a tensor both groups begin with one and the same object."""
    model, optimizer = grouped(problem, lr)
    knobs = [
        hdet.LearningRate(groups="first", spread=TwoLevel(0.2)),
        hdet.LearningRate(groups=1, schedule=0.05, spread=TwoLevel(0.3)),
        hdet.WeightDecay(spread=TwoLevel(0.4)),
    ]
    engine = Engine(hdet.replicate(model, optimizer, n=8), knobs, window=4, total_steps=10)
    levels = engine.knobs[0].levels
    for index, own in enumerate(engine.optimizers):
        first, last = own.param_groups
        assert float(first["lr"]) == pytest.approx(0.01 * math.exp(levels[index]), rel=1e-6)
        assert float(last["lr"]) == pytest.approx(0.05 * math.exp(engine.knobs[1].levels[index]), rel=1e-6)
        assert first["weight_decay"] == pytest.approx(0.1 * math.exp(engine.knobs[2].levels[index]))
        assert last["weight_decay"] == 0.0
    train(engine)
    assert set(engine.bases) == {"learning_rate[first]", "learning_rate[1]", "weight_decay"}


def test_gradient_accumulation(problem: Any, assert_same: Any) -> None:
    """Several backwards inside one `with`, or several `with`s: the engine only sees the update."""
    results = []
    for split in (False, True):
        model = problem.model()
        engine = Engine(
            hdet.replicate(model, TORCH.SGD(model.parameters(), lr=0.05), n=2),
            [hdet.LearningRate(spread=TwoLevel(0.2))],
            window=3,
            total_steps=6,
        )
        for step in range(6):
            losses = [torch.zeros(()) for _ in engine.replicas]
            rounds = [[0], [1]] if split else [[0, 1]]
            for micros in rounds:
                for number, replica in enumerate(engine.replicas):
                    with replica:
                        for micro in micros:
                            loss = problem.loss(replica.model, problem.batch(step, 10 * micro + number)) / 2
                            loss.backward()
                            losses[number] = losses[number] + loss.detach()
            engine.share_gradients()
            for optimizer in engine.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            engine.step(losses)
        results.append(model.state_dict())
    assert_same(results[0], results[1])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_clipping_after_sharing(set_to_none: bool, problem: Any, train: Any) -> None:
    model = problem.model()
    optimizer = TORCH.SGD(model.parameters(), lr=0.05)
    engine = Engine(hdet.replicate(model, optimizer, n=3), [hdet.LearningRate()], window=3, total_steps=6)
    norms: list[float] = []

    def clip(own: Optimizer) -> None:
        parameters = own.param_groups[0]["params"]
        norms.append(float(nn.utils.clip_grad_norm_(parameters, 0.1)))

    train(engine, before_update=clip)
    for step in range(6):  # all clip the same, shared gradient
        assert len(set(norms[3 * step : 3 * step + 3])) == 1


def test_bf16_autocast(problem: Any, train: Any, assert_alike: Any) -> None:
    model = problem.model()
    engine = Engine(
        hdet.replicate(model, TORCH.AdamW(model.parameters(), lr=0.01), n=3),
        [hdet.LearningRate()],
        window=5,
        signal=hdet.Probe(lambda m, b: problem.loss(m, b), lambda window: [problem.batch(window, -j) for j in (1, 2)]),
        total_steps=15,
    )

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(batch[0])
        assert out.dtype == torch.bfloat16
        return (out.float() - batch[1]).square().mean()

    records = train(engine, loss=loss)
    assert records[-1].loss < records[0].loss
    assert_alike(engine)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_models_of_another_precision(dtype: Any, problem: Any, train: Any, assert_alike: Any) -> None:
    model = problem.model(nn.BatchNorm1d(6)).to(dtype)
    engine = Engine(
        hdet.replicate(model, TORCH.AdamW(model.parameters(), lr=0.01), n=3),
        [hdet.LearningRate()],
        window=5,
        signal=hdet.Probe(problem.loss, [[t.to(dtype) for t in problem.batch(-1, j)] for j in range(2)], at="average"),
        total_steps=15,
    )
    records = train(engine, batch=lambda s, i: [t.to(dtype) for t in problem.batch(s, i)])
    assert records[-1].loss < records[0].loss
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert_alike(engine)


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_grad_scalers_skip_steps(gradients: Any, problem: Any) -> None:
    """An overflow skips updates as it does without hdet, and the window survives it."""
    results = []
    for explored in (True, False):
        model = problem.model()
        optimizer = TORCH.SGD(model.parameters(), lr=0.05, momentum=0.9)
        knob = hdet.LearningRate(schedule=OneCycle(0.05, total_steps=8), spread=TwoLevel(0))
        engine = Engine(hdet.replicate(model, optimizer, n=2), [knob], window=4, gradients=gradients)
        scheduler = None
        if not explored:
            scheduler = TORCH.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=8, cycle_momentum=False)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        skipped = 0
        for step in range(8):
            replicas = engine.replicas if explored else engine.replicas[:1]
            losses = []
            for replica in replicas:
                with replica:
                    loss = problem.loss(replica.model, problem.batch(step, 0))
                    scaler.scale(loss).backward()
                    if step == 2:
                        replica.model[0].weight.grad.fill_(math.inf)
                losses.append(loss.detach())
            if explored:
                engine.share_gradients()
            before = model[0].weight.detach().clone()
            for replica in replicas:
                scaler.unscale_(replica.optimizer)
                nn.utils.clip_grad_norm_(replica.model.parameters(), 1.0)
                scaler.step(replica.optimizer)
                replica.optimizer.zero_grad()
            scaler.update()
            skipped += torch.equal(before, model[0].weight)
            if scheduler is not None:
                scheduler.step()
            if explored:
                record = engine.step(losses)
                assert record is None or record.faults == []
        assert skipped == 1
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_batch_norm_statistics_are_averaged_and_its_counter_is_kept(
    problem: Any, train: Any, assert_alike: Any
) -> None:
    model = problem.model(nn.BatchNorm1d(6))
    optimizer = TORCH.SGD(model.parameters(), lr=0.05)
    engine = Engine(hdet.replicate(model, optimizer, n=3), [hdet.LearningRate()], window=4, total_steps=8)
    means: list[torch.Tensor] = []

    def after(step: int) -> None:
        if step == 3:
            means.extend(replica.model[2].running_mean.clone() for replica in engine.replicas)

    train(engine, 4, after_update=after)
    assert not torch.equal(means[0], means[1])
    torch.testing.assert_close(model[2].running_mean, torch.stack(means).mean(dim=0))
    assert model[2].num_batches_tracked == 4
    assert_alike(engine)
    assert all(module.training for module in model.modules())


class Tied(nn.Module):
    """Tied weights, a frozen layer, a mask of infinities, an empty parameter, a branch not always taken."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.rare = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)
        self.out = nn.Linear(4, 1)
        self.empty = nn.Parameter(torch.zeros(0))
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
        self.register_buffer("count", torch.zeros(0, dtype=torch.long))
        self.take_rare = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.head(torch.tanh(self.embed(x))))
        x = x + torch.softmax(self.mask, dim=-1).sum(dim=0)
        if self.take_rare:
            x = x + self.rare(x)
        out: torch.Tensor = self.out(x)
        return out


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_tied_frozen_unused_and_empty_parameters(
    gradients: Any, problem: Any, train: Any, assert_alike: Any, assert_same: Any
) -> None:
    torch.manual_seed(0)
    model = Tied()
    optimizer = TORCH.AdamW(model.parameters(), lr=0.01)
    frozen, never = model.frozen.weight.clone(), model.never.weight.clone()
    engine = Engine(
        hdet.replicate(model, optimizer, n=3),
        [hdet.LearningRate(), hdet.WeightDecay(schedule=1e-3)],
        window=5,
        gradients=gradients,
        signal=problem.probe(at="average"),
        total_steps=10,
    )
    engine.replicas[2].model.take_rare = True
    records = train(engine)
    assert [record.faults for record in records] == [[], []]
    assert_alike(engine)
    assert torch.equal(model.frozen.weight, frozen)
    assert torch.equal(model.never.weight, never)
    assert torch.equal(model.mask, torch.full((4, 4), -math.inf).triu(1))
    for replica in engine.replicas:
        assert replica.model.head.weight is replica.model.embed.weight
    # Only replica 2 has state of its own for the rare branch; after the merge all have it.
    rare = [model.rare.weight for model, _ in engine.hosts]
    states = [own.state[p] for (_, own), p in zip(engine.hosts, rare, strict=True)]
    assert states[0]["exp_avg"].abs().sum() > 0
    assert_same(states[0], states[1])
    assert_same(states[0], states[2])


def test_a_parameter_unused_everywhere_gets_no_gradient(problem: Any) -> None:
    """Under shared gradients too: with one, AdamW would decay it."""
    torch.manual_seed(0)
    model = Tied()
    replicas = hdet.replicate(model, TORCH.AdamW(model.parameters(), lr=0.01), n=2)
    for replica in replicas.local:
        problem.loss(replica.model, problem.batch(0, replica.index)).backward()
    replicas.share_gradients()
    assert model.never.weight.grad is None
    assert model.frozen.weight.grad is None
    assert model.out.weight.grad is not None


def test_schedule_free_is_probed_at_its_own_average(
    problem: Any, train: Any, assert_same: Any, assert_alike: Any
) -> None:
    """In the optimizer's eval mode, and its weights are put back bit for bit."""
    modes: list[bool] = []

    def build(signal: Any) -> tuple[nn.Module, Optimizer]:
        model = problem.model()
        optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.02)
        optimizer.train()
        knob = hdet.LearningRate(spread=TwoLevel(0), controller=Hold())
        engine = Engine(hdet.replicate(model, optimizer, n=2), [knob], window=5, signal=signal, total_steps=20)
        train(engine)
        return model, optimizer

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        modes.append(model.training)
        return problem.loss(model, batch)

    probed, own = build(hdet.Probe(loss, [problem.batch(-1, j) for j in range(2)]))
    unprobed, other = build(hdet.signals.TrainingLoss())
    assert_same(probed.state_dict(), unprobed.state_dict())
    assert_same(own.state_dict()["state"], other.state_dict()["state"])
    assert modes
    assert not any(modes)
    assert own.param_groups[0]["train_mode"]


def test_schedule_free_is_explored(problem: Any, train: Any, assert_alike: Any) -> None:
    """What it keeps in its groups (the sum of weights, the largest rate) is merged along."""
    model = problem.model()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01)
    optimizer.train()
    engine = Engine(
        hdet.replicate(model, optimizer, n=4),
        [hdet.LearningRate(spread=TwoLevel(0.3))],
        window=5,
        signal=problem.probe(),
        total_steps=20,
    )
    records = train(engine)
    assert records[-1].loss < records[0].loss
    assert_alike(engine)
    groups = [own.param_groups[0] for own in engine.optimizers]
    for key in ("weight_sum", "lr_max", "k", "lr"):
        assert len({group[key] for group in groups}) == 1, key


def test_micro_batches_are_plain_accumulation(problem: Any, train: Any, assert_same: Any) -> None:
    model = problem.model(nn.BatchNorm1d(6))
    reference = copy.deepcopy(model)
    seats = hdet.micro_batches(model, TORCH.AdamW(model.parameters(), lr=0.01), n=4)
    knob = hdet.LearningRate(schedule=OneCycle(0.05, total_steps=12), spread=TwoLevel(0))
    engine = Engine(seats, [knob], window=5, signal=problem.probe())
    train(engine)
    own = TORCH.AdamW(reference.parameters(), lr=0.01)
    scheduler = TORCH.lr_scheduler.OneCycleLR(own, 0.05, total_steps=12, cycle_momentum=False)
    for step in range(12):
        for index in range(4):
            problem.loss(reference, problem.batch(step, index)).backward()
        for p in reference.parameters():
            assert p.grad is not None
            p.grad.mul_(0.25)
        own.step()
        own.zero_grad()
        scheduler.step()
    assert_same(model.state_dict(), reference.state_dict())
    assert len(engine.history) == 3


def explored_beside(problem: Any, rate: Any = 0.1, **options: Any) -> Engine:
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    knob = hdet.LearningRate(spread=TwoLevel(0.0), controller=Hold(), **options)
    return Engine(hdet.micro_batches(model, optimizer, n=1), [knob], window=5, total_steps=10)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
def test_a_scheduler_beside_a_rates_knob_is_noticed(rate: Any, problem: Any, train: Any) -> None:
    engine = explored_beside(problem, copy.deepcopy(rate))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.optimizers[0], 0.5)
    with pytest.raises(
        StepError,
        match=r"learning_rate: hdet put 0\.1 into param_groups\[0\]\['lr'\], and something else has made it 0\.05; "
        r".*drop it and give the knob its course.*hdet\.attach\(\.\.\., scheduler=scheduler\).*engine\.reapply\(\)",
    ):
        train(engine, after_update=lambda step: scheduler.step())
    assert engine.step_count == 1


def test_a_scheduler_that_steps_after_the_engine_is_noticed_at_the_next_step(problem: Any, train: Any) -> None:
    engine = explored_beside(problem, schedule=Cosine(0.1, 10))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.optimizers[0], 0.5)
    train(engine, 1)
    scheduler.step()
    with pytest.raises(StepError, match=r"something else has made it 0\.0333333"):
        train(engine, 2)


def test_a_dropout_rate_that_the_user_writes_beside_its_knob_is_noticed(problem: Any, train: Any) -> None:
    dropout = nn.Dropout(0.1)
    model = problem.model(dropout)
    knob = hdet.Dropout(spread=TwoLevel(0.0), controller=Hold())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(hdet.micro_batches(model, optimizer, n=1), [knob], window=5, total_steps=10, signal=problem.probe())
    with pytest.raises(StepError, match=r"dropout: hdet put 0\.1 into Dropout\.p, .* made it 0\.4"):
        train(engine, after_update=lambda step: setattr(dropout, "p", 0.4))


def test_what_was_written_on_purpose_is_put_right_by_reapply(problem: Any, train: Any) -> None:
    """An optimizer's state loaded between two steps brings the rates of then."""
    engine = explored_beside(problem, schedule=Cosine(0.1, 10))
    train(engine, 3)
    before = copy.deepcopy(engine.optimizers[0].state_dict())
    train(engine, 4)
    engine.optimizers[0].load_state_dict(before)
    engine.reapply()
    train(engine)
    assert engine.finished


def test_an_engine_that_another_has_replaced_says_so(problem: Any, train: Any) -> None:
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = [
        Engine(hdet.micro_batches(model, optimizer, n=1), [knob], window=5, total_steps=10, signal=problem.probe())
        for knob in (hdet.LearningRate(), hdet.WeightDecay(schedule=0.1))
    ]
    with pytest.raises(StepError, match=r"another engine has been made on this model .*all knobs in one"):
        train(made[0])
    train(made[1])
    assert made[1].finished


@pytest.mark.parametrize("n", [1, 2])
def test_with_nothing_to_share_gradients_are_left_alone(n: int, problem: Any) -> None:
    model = problem.model()
    engine = Engine(hdet.micro_batches(model, torch.optim.SGD(model.parameters(), lr=0.1), n=n), [], total_steps=10)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    engine.share_gradients()
    assert all(torch.equal(p.grad, torch.full_like(p, 1.0 / n)) for p in model.parameters())


def test_replicas_that_say_nothing_of_sharing_are_asked_to_share(problem: Any) -> None:
    class Own(Copies):
        asked = 0

        def __init__(self, hosts: Any) -> None:
            super().__init__(hosts)
            del self.shares_on_call

        def share_gradients(self) -> None:
            Own.asked += 1

    model = problem.model()
    engine = Engine(Own([(model, torch.optim.SGD(model.parameters(), lr=0.1))]), [], total_steps=10)
    engine.share_gradients()
    assert Own.asked == 1
