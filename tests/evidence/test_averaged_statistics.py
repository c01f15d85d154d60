"""With which BatchNorm statistics evidence evaluates averaged weights, and that training is left as it was."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import schedulefree
import torch
from torch import Tensor, nn

import hdet
from hdet.controllers import Hold
from hdet.evidence import Analytic, Divergent, GroupLines, Line
from hdet.evidence.parts.batch_statistics import BatchStatistics, keeping
from hdet.replicas import tensors
from hdet.spreads import TwoLevel

WINDOW = 12
PASSES = 3
"""Of an evaluation of the probe."""


def batch(step: int, index: int = 0) -> tuple[Tensor, Tensor]:
    """Noise enough that each step goes another way, so that averaged weights are far from the last."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    x = torch.randn(8, 4, generator=generator)
    return x, x.sum(dim=1, keepdim=True) + 2.0 * torch.randn(8, 1, generator=generator)


class Seen:
    """A probe that notes in each pass whether BatchNorm normalises by the batch, and the statistics that it holds."""

    def __init__(self, problem: Any) -> None:
        self.problem = problem
        self.passes: list[tuple[bool, Tensor]] = []
        self.probe = hdet.Probe(self.loss, problem.probe().batches)

    def loss(self, model: Any, batch: Any) -> Tensor:
        norm = model[2]
        self.passes.append((norm.training, norm.running_mean.clone()))
        own: Tensor = self.problem.loss(model, batch)
        return own

    def with_statistics(self, expected: Tensor) -> int:
        """Passes in evaluation mode that had these."""
        return sum(not by_batch and torch.allclose(mean, expected, atol=1e-6) for by_batch, mean in self.passes)

    @property
    def looks(self) -> int:
        """Passes that normalised by the batch."""
        return sum(by_batch for by_batch, _ in self.passes)


def engine_of(problem: Any, knobs: list[hdet.Knob], signal: hdet.Probe, **options: Any) -> hdet.Engine:
    model = problem.model(nn.BatchNorm1d(6, momentum=0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    home = hdet.micro_batches(model, optimizer, n=1)
    return hdet.Engine(home, knobs, window=WINDOW, total_steps=2 * WINDOW, signal=signal, **options)


def held(**evidence: Any) -> list[hdet.Knob]:
    known = {"rate": hdet.LearningRate, "decay": hdet.WeightDecay}
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
        return at_last.carried().layers["2"][0]


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
    ("evidence", "at_last", "at_average"),
    [
        ({"rate": EVERY}, 3, 3),
        ({"rate": GroupLines(line=EVERY)}, 3, 3),
        ({"decay": Analytic()}, 0, 2),
        ({"rate": EVERY, "decay": Analytic()}, 3, 5),
        ({"rate": Line(read_average_above=1e9)}, 3, 0),
    ],
)
def test_averaged_weights_are_read_with_statistics_of_their_own(
    evidence: dict[str, Any], at_last: int, at_average: int, problem: Any, train: Any
) -> None:
    """Looked for once a window, however many ask."""
    seen = Seen(problem)
    engine = engine_of(problem, held(**evidence), seen.probe)
    kept, average = first_window(problem, engine, train)
    assert seen.with_statistics(kept) == PASSES * at_last
    assert seen.with_statistics(average) == PASSES * at_average
    assert seen.looks == PASSES * 2 * bool(at_average)


def test_replicas_are_compared_at_their_averages_with_them_too(problem: Any, train: Any) -> None:
    seen = Seen(problem)
    probe = hdet.Probe(seen.loss, problem.probe().batches, at="average")
    model = problem.model(nn.BatchNorm1d(6, momentum=0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    knob = hdet.LearningRate(spread=TwoLevel(0.1), evidence=Divergent(), controller=Hold())
    engine = hdet.Engine(hdet.replicate(model, optimizer, n=2), [knob], window=WINDOW, signal=probe, gradients="local")
    means: list[Tensor] = []
    paths: list[list[list[Tensor]]] = [[], []]
    copies: list[nn.Module] = []

    def after(step: int) -> None:
        copies[:] = [copy.deepcopy(host) for host, _ in engine.hosts]
        for path, (host, _) in zip(paths, engine.hosts, strict=True):
            path.append(tensors.clones(tensors.parameters(host)))

    train(engine, WINDOW, batch=batch, after_update=after)
    means = [expected(problem, own, path) for own, path in zip(copies, paths, strict=True)]
    assert [seen.with_statistics(mean) for mean in means] == [PASSES, PASSES]
    assert seen.looks == 2 * PASSES * 2


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
    engine = engine_of(problem, held(rate=EVERY, decay=Analytic(stride=5)), seen.probe)
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
    stale = float(problem.probe().measure(own, 0).mean())
    torch.optim.swa_utils.update_bn([batch(step)[0] for step in range(100, 400)], own)
    truth = float(problem.probe().measure(own, 0).mean())
    assert abs(told - truth) < 0.5 * abs(stale - truth)
