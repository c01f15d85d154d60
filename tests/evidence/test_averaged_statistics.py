"""With which BatchNorm statistics evidence evaluates its points, and that training is left as it was."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import schedulefree
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

import hdet
from hdet.controllers import Hold
from hdet.evidence import Analytic, Divergent, GroupLines, Line, Recursion
from hdet.evidence.parts.batch_statistics import BatchStatistics
from hdet.replicas import gradients, tensors
from hdet.replicas.batch_norm import by_each_batch, keeping
from hdet.spreads import TwoLevel

WINDOW = 12
PASSES = 3
"""Of an evaluation of the probe."""


def batch(step: int, index: int = 0) -> tuple[Tensor, Tensor]:
    """Noise enough that each step goes another way, so that averaged weights are far from the last."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    x = torch.randn(8, 4, generator=generator)
    return x, x.sum(dim=1, keepdim=True) + 2.0 * torch.randn(8, 1, generator=generator)


@dataclass
class Pass:
    """What BatchNorm had in a pass of the probe: whether it trained, what it normalised by, and its input's own."""

    trains: bool
    mean: Tensor
    own_mean: Tensor


class Seen:
    """A probe that notes its passes."""

    def __init__(self, problem: Any) -> None:
        self.problem = problem
        self.passes: list[Pass] = []
        self.probe = hdet.Probe(self.loss, problem.probe().batches)

    def loss(self, model: Any, batch: Any) -> Tensor:
        with_hook = model[2].register_forward_hook(self._note)
        own: Tensor = self.problem.loss(model, batch)
        with_hook.remove()
        return own

    def _note(self, norm: Any, inputs: Any, output: Any) -> None:
        x, normalised = inputs[0].detach(), (output.detach() - norm.bias.detach()) / norm.weight.detach()
        own_mean = x.mean(dim=0)
        mean = own_mean - normalised.mean(dim=0) * x.std(dim=0) / normalised.std(dim=0)
        self.passes.append(Pass(norm.training, mean, own_mean))

    def with_statistics(self, expected: Tensor) -> int:
        """Passes in evaluation mode that had these."""
        return sum(not one.trains and torch.allclose(one.mean, expected, atol=1e-5) for one in self.passes)

    @property
    def by_batch(self) -> int:
        """Passes in evaluation mode that had those of their batch."""
        return sum(not one.trains and torch.allclose(one.mean, one.own_mean, atol=1e-5) for one in self.passes)

    @property
    def looks(self) -> int:
        """Passes in training mode."""
        return sum(one.trains for one in self.passes)


def engine_of(problem: Any, knobs: list[hdet.Knob], signal: hdet.Probe, **options: Any) -> hdet.Engine:
    model = problem.model(nn.BatchNorm1d(6, momentum=0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, weight_decay=0.1)
    home = hdet.micro_batches(model, optimizer, n=1)
    return hdet.Engine(home, knobs, window=WINDOW, total_steps=2 * WINDOW, signal=signal, **options)


def held(**evidence: Any) -> list[hdet.Knob]:
    known = {"rate": hdet.LearningRate, "decay": hdet.WeightDecay, "momentum": hdet.Momentum}
    return [known[name](evidence=own, controller=Hold()) for name, own in evidence.items()]


EVERY = Line(read_average_above=None)


def expected(problem: Any, model: nn.Module, path: list[list[Tensor]]) -> Tensor:
    """Running means at the average over the window, by what the probe's batches show; the model is left as it was."""
    own, probe = copy.deepcopy(model), problem.probe()
    with torch.no_grad():
        at_last = BatchStatistics(
            keeping(own), lambda: (probe.loss(own, x) for x in probe.batches), lambda: tensors.evaluating(own)
        )
        for parameter, *values in zip(own.parameters(), *path, strict=True):
            parameter.copy_(torch.stack(values).mean(dim=0))
        return at_last.limited().layers["2"][0]


def first_window(problem: Any, engine: hdet.Engine, train: Any) -> tuple[Tensor, Tensor]:
    """Train one; the running means that were kept, and those that belong to the average."""
    model = engine.hosts[0][0]
    path: list[list[Tensor]] = []
    held: list[nn.Module] = []

    def after(step: int) -> None:
        path.append(tensors.clones(tensors.parameters(model)))
        held[:] = [copy.deepcopy(model)]

    train(engine, WINDOW, batch=batch, after_update=after)
    kept = held[0][2].running_mean  # type: ignore[index]
    average = expected(problem, held[0], path)
    assert not torch.allclose(kept, average, atol=1e-3)
    return kept, average


@pytest.mark.parametrize(
    ("evidence", "by_batch", "at_average"),
    [
        ({"rate": EVERY}, 6, 0),
        ({"rate": GroupLines(line=EVERY)}, 6, 0),
        ({"rate": Line(read_average_above=1e9)}, 3, 0),
        ({"momentum": Recursion()}, 2, 0),
        ({"decay": Analytic()}, 0, 2),
        ({"rate": EVERY, "decay": Analytic()}, 6, 2),
    ],
)
def test_points_of_the_path_have_statistics_of_each_batch_and_those_of_decay_the_averages(
    evidence: dict[str, Any], by_batch: int, at_average: int, problem: Any, train: Any
) -> None:
    """The average's are looked for once a window."""
    seen = Seen(problem)
    engine = engine_of(problem, held(**evidence), seen.probe)
    kept, average = first_window(problem, engine, train)
    assert seen.by_batch == PASSES * by_batch
    assert seen.with_statistics(average) == PASSES * at_average
    assert seen.with_statistics(kept) == 0
    assert seen.looks == PASSES * 2 * bool(at_average)


@pytest.mark.parametrize("at", ["last", "average"])
def test_replicas_are_compared_with_those_of_each_batch(at: Any, problem: Any, train: Any) -> None:
    seen = Seen(problem)
    probe = hdet.Probe(seen.loss, problem.probe().batches, at=at)
    model = problem.model(nn.BatchNorm1d(6, momentum=0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    knob = hdet.LearningRate(spread=TwoLevel(0.1), evidence=Divergent(), controller=Hold())
    engine = hdet.Engine(hdet.replicate(model, optimizer, n=2), [knob], window=WINDOW, signal=probe, gradients="local")
    train(engine, WINDOW, batch=batch)
    assert seen.by_batch == len(seen.passes) == 2 * PASSES


def test_a_rate_that_is_right_is_not_lowered_because_kept_statistics_lag(train: Any, problem: Any) -> None:
    """Along a path on which only the inputs of a layer shift the loss is the same everywhere."""
    slopes = {}
    for momentum in (0.02, None):  # of which the first lags far behind; the other has the mean of all
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=momentum), nn.Linear(6, 1))
        model[2].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        home = hdet.micro_batches(model, optimizer, n=1)
        engine = hdet.Engine(home, held(rate=Line()), window=WINDOW, total_steps=2 * WINDOW, signal=problem.probe())
        for step in range(WINDOW):
            with engine.replicas[0]:
                loss = problem.loss(model, batch(step))
                loss.backward()
            # The first layer's biases alone move, which no loss of the network's depends on.
            model[0].weight.grad.zero_()
            model[1].weight.grad.zero_()
            model[1].bias.grad.zero_()
            model[0].bias.grad.fill_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            engine.step(loss.detach())
        slopes[momentum] = engine.history.windows[0].estimates["learning_rate"]["slope"]
    assert slopes == pytest.approx(dict.fromkeys(slopes, 0.0), abs=1e-5)


@pytest.mark.parametrize("values", [7, 8])
def test_a_batch_of_few_values_has_the_kept_ones(values: int) -> None:
    layer = nn.BatchNorm1d(3).train()
    inputs = 1.0 + 2.0 * torch.randn(values, 3)
    with by_each_batch(layer):
        layer.eval()
        found = layer(inputs)
    own = nn.BatchNorm1d(3, track_running_stats=False)(inputs)
    assert torch.allclose(found, inputs, atol=1e-4) == (values == 7)
    assert torch.allclose(found, own, atol=1e-5) == (values == 8)


def test_gradients_go_through_the_statistics_of_each_batch(problem: Any) -> None:
    """As those of the loss that is measured do: the weights before a layer have no scale."""
    model = problem.model(nn.BatchNorm1d(6))
    probe = problem.probe()
    with probe.evaluated(model, 0):
        found = gradients.summed(model, (probe.loss(model, own) for own in probe.batches))
    training = copy.deepcopy(model)
    sum(probe.loss(training, own) for own in probe.batches).backward()
    assert all(torch.allclose(own, p.grad, atol=1e-5) for own, p in zip(found, training.parameters(), strict=True))


def test_an_error_of_a_hook_of_the_users_is_told_and_nothing_is_left_in_force() -> None:
    def refuse(layer: nn.Module, inputs: object) -> None:
        raise KeyError("refused")

    layer = nn.BatchNorm1d(3)
    layer.register_forward_pre_hook(refuse)
    with warnings.catch_warnings(action="error"), by_each_batch(layer), pytest.raises(KeyError, match="refused"):
        layer(torch.randn(16, 3))
    other, inputs = nn.BatchNorm1d(3).eval(), torch.randn(16, 3)
    assert torch.allclose(other(inputs), inputs, atol=1e-4)  # by what it keeps, as ever


class Interrupted(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        raise KeyboardInterrupt


def test_after_an_interrupt_layers_keep_statistics_of_their_batches_as_ever() -> None:
    """Torch calls no hook of a pass that Ctrl-C ends."""
    model = nn.Sequential(nn.Linear(3, 3), Interrupted(3))
    probe = hdet.Probe(lambda model, x: model(x).square().mean(), [torch.randn(16, 3) for _ in range(2)])
    with pytest.raises(KeyboardInterrupt):
        probe.measure(model, 0)
    layer = nn.BatchNorm1d(3)
    layer(1.0 + torch.randn(16, 3))
    assert layer.running_mean.all()


def test_a_hook_of_all_modules_that_raises_leaves_a_mode_of_the_users_in_force() -> None:
    def refuse(layer: nn.Module, inputs: object) -> None:
        raise KeyError("refused")

    layer = nn.BatchNorm1d(3)
    hook = register_module_forward_pre_hook(refuse)
    try:
        with torch.device("meta"):
            with by_each_batch(layer), pytest.raises(KeyError, match="refused"):
                layer(torch.zeros(16, 3))
            assert torch.zeros(1).is_meta
    finally:
        hook.remove()


class ChannelsLast(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.transpose(1, 2)).transpose(1, 2)


def test_a_layer_that_turns_its_input_first_has_the_statistics_of_what_it_normalises() -> None:
    for length in (5, 3):  # the latter is as long as there are channels
        inputs = torch.randn(16, length, 3) * torch.tensor([1.0, 2.0, 3.0]) + torch.tensor([0.0, 1.0, 2.0])
        layer = ChannelsLast(3)
        expected = copy.deepcopy(layer)(inputs)
        with by_each_batch(layer):
            layer.eval()
            assert torch.allclose(layer(inputs), expected, atol=1e-5)


@pytest.mark.parametrize("failing", [False, True])
def test_what_a_layer_keeps_is_the_same_tensors_after(failing: bool) -> None:
    layer = nn.BatchNorm1d(3).train()
    kept = (layer.running_mean, layer.running_var, layer.num_batches_tracked)
    inputs = torch.randn(16, 4 if failing else 3)
    with pytest.raises(RuntimeError) if failing else nullcontext(), by_each_batch(layer):
        layer.eval()
        layer(inputs)
    assert all(one is other for one, other in zip(kept, layer.buffers(), strict=True))
    assert not layer.running_mean.any()
    assert not layer._forward_pre_hooks
    assert not layer._forward_hooks


def test_a_layer_that_does_not_follow_the_batches_keeps_its_own(problem: Any, train: Any) -> None:
    seen = Seen(problem)
    engine = engine_of(problem, held(rate=EVERY, decay=Analytic()), seen.probe)
    norm = engine.hosts[0][0][2].eval()
    kept = norm.running_mean.clone()
    train(engine, WINDOW, batch=batch)
    assert seen.looks == 0
    assert seen.with_statistics(kept) == len(seen.passes) > 0


@pytest.mark.parametrize("failing", [False, True])
def test_training_is_left_as_it_was_bit_for_bit(failing: bool, problem: Any, train: Any, assert_same: Any) -> None:
    """Where an error in the user's loss ends the evidence half-way, too."""
    plain = engine_of(problem, held(rate=Line(read_average_above=1e9)), problem.probe())
    train(plain, batch=batch)
    left = [4.5 * PASSES if failing else np.inf]

    def loss(model: Any, given: Any) -> Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError("no more")
        own: Tensor = problem.loss(model, given)
        return own

    engine = engine_of(problem, held(rate=EVERY, decay=Analytic()), hdet.Probe(loss, problem.probe().batches))
    norm = engine.hosts[0][0][2]
    if failing:
        before: list[dict[str, Any]] = []

        def after(step: int) -> None:
            before[:] = [copy.deepcopy(engine.hosts[0][0].state_dict())]

        with pytest.raises(MemoryError):
            train(engine, batch=batch, after_update=after)
        assert_same(engine.hosts[0][0].state_dict(), before[0])
    else:
        train(engine, batch=batch)
        assert_same(engine.hosts[0][0].state_dict(), plain.hosts[0][0].state_dict())
    assert (norm.momentum, norm.training) == (0.5, True)
    assert not norm._forward_pre_hooks
    assert not norm._forward_hooks


def test_a_model_that_is_compiled_whole_has_no_more_graphs(problem: Any) -> None:
    """Hooks and flags of a look would make one of each of the probe's batches, of which dynamo allows eight."""
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    model: Any = torch.compile(problem.model(nn.BatchNorm1d(6)), backend=count, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    probe = hdet.Probe(problem.loss, [problem.batch(-1, j) for j in range(12)])
    home = hdet.micro_batches(model, optimizer, n=1)
    engine = hdet.Engine(home, held(rate=EVERY, decay=Analytic()), window=4, signal=probe, total_steps=12)
    for step in range(12):
        with engine.replicas[0]:
            loss = problem.loss(model, batch(step))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.step(loss.detach())
    assert engine.finished
    assert len(graphs) <= 3  # of training, of evaluation, and of evaluation without gradients


def test_a_window_asks_for_one_look_at_the_last_weights(problem: Any, train: Any) -> None:
    """Averages of two strides are of other weights."""
    seen = Seen(problem)
    model = problem.model(nn.BatchNorm1d(6))
    groups = [{"params": list(part.parameters())} for part in (model[:2], model[2:])]
    home = hdet.micro_batches(model, torch.optim.SGD(groups, lr=0.1, weight_decay=0.1), n=1)
    knobs = [
        hdet.WeightDecay(groups=group, evidence=Analytic(stride=stride), controller=Hold())
        for group, stride in enumerate((None, 5))
    ]
    engine = hdet.Engine(home, knobs, window=WINDOW, total_steps=2 * WINDOW, signal=seen.probe)
    train(engine, WINDOW, batch=batch)
    assert seen.looks == PASSES * 3


def test_a_schedule_free_average_has_the_statistics_that_are_kept(problem: Any, train: Any) -> None:
    """The weights that it evaluates are an average already, and are evaluated as they are."""
    seen = Seen(problem)
    model = problem.model(nn.BatchNorm1d(6))
    optimizer = schedulefree.SGDScheduleFree(model.parameters(), lr=0.1)
    optimizer.train()
    knob = hdet.LearningRate(evidence=EVERY, controller=Hold())
    home = hdet.micro_batches(model, optimizer, n=1)
    engine = hdet.Engine(home, [knob], window=WINDOW, total_steps=2 * WINDOW, signal=seen.probe)
    train(engine, WINDOW, batch=batch)
    assert seen.looks == 0


def test_the_loss_is_told_as_it_would_be_after_training_there(problem: Any, train: Any) -> None:
    """Over batches by which the statistics are worked out anew; with those of the last weights it is further off."""
    model = problem.model(nn.BatchNorm1d(6, momentum=0.02))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():  # until the kept ones are those of these weights
        for step in range(400):
            model(batch(step + 1000)[0])
    optimizer.param_groups[0]["weight_decay"] = 0.1
    home = hdet.micro_batches(model, optimizer, n=1)
    knobs = held(decay=Analytic(width=0.01))
    engine = hdet.Engine(home, knobs, window=WINDOW, total_steps=2 * WINDOW, signal=problem.probe())
    start = tensors.clones(tensors.parameters(model))
    path: list[list[Tensor]] = []

    def after(step: int) -> None:
        path.append(tensors.clones(tensors.parameters(model)))
        if step == WINDOW - 1:
            torch.optim.swa_utils.update_bn([batch(own)[0] for own in range(100, 400)], model)

    train(engine, WINDOW, batch=batch, after_update=after)
    assert any(not torch.equal(one, other) for one, other in zip(start, path[-1], strict=True))
    told = engine.history.windows[0].estimates["weight_decay"]["level"]
    own = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, *values in zip(own.parameters(), *path, strict=True):
            parameter.copy_(torch.stack(values).mean(dim=0))
    stale = float(problem.probe().measure(own, 0, kept_statistics=True).mean())
    torch.optim.swa_utils.update_bn([batch(step)[0] for step in range(100, 400)], own)
    truth = float(problem.probe().measure(own, 0, kept_statistics=True).mean())
    assert abs(told - truth) < 0.5 * abs(stale - truth)
