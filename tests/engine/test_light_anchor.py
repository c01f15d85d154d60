"""Where nothing diverges and a guard keeps a point, the anchor holds weights alone; all else is as it was."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hdet
from hdet import Engine
from hdet.evidence import Harvest, Window
from hdet.schedules import Cosine

STEPS = 40


def make(problem: Any, kind: Any = torch.optim.AdamW, **options: Any) -> Engine:
    model = problem.model()
    knob = hdet.LearningRate(schedule=Cosine(0.01, STEPS, warmup=0.5), evidence=hdet.evidence.Line())
    settings: dict[str, Any] = {"guard": hdet.Rewind(), "window": 5, "signal": problem.probe(), **options}
    return Engine(
        hdet.micro_batches(model, kind(model.parameters(), lr=0.01), 2), [knob], total_steps=STEPS, **settings
    )


def moments(engine: Engine) -> int:
    """How many tensors of the optimizer's state the anchor holds that are not another point's."""
    held = {id(value) for own in engine.cycle.anchor.optimizer_state()["state"].values() for value in own.values()}
    watch = engine.cycle.watch
    lent = watch.point if watch is not None else None
    states = lent.optimizer_state()["state"].values() if lent is not None else ()
    return len(held - {id(value) for own in states for value in own.values()})


def chained(parameters: Any, lr: float) -> hdet.ChainedOptimizer:
    first, *rest = parameters
    return hdet.ChainedOptimizer(torch.optim.SGD([first], lr=lr, momentum=0.9), torch.optim.AdamW(rest, lr=lr))


def with_muon(parameters: Any, lr: float) -> hdet.ChainedOptimizer:
    held = list(parameters)
    matrices = torch.optim.Muon([own for own in held if own.ndim == 2], lr=lr)
    return hdet.ChainedOptimizer(matrices, torch.optim.AdamW([own for own in held if own.ndim != 2], lr=lr))


muon = pytest.param(with_muon, marks=pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 has it"))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, chained, muon])
def test_it_holds_no_state_of_the_optimizer(kind: Any, problem: Any, train: Any) -> None:
    engine = make(problem, kind)
    train(engine, 12)
    assert moments(engine) == 0
    whole = make(problem, guard=None)
    train(whole, 12)
    assert moments(whole) > 0


def test_an_optimizer_whose_state_belongs_to_its_weights_is_held_whole(problem: Any, train: Any) -> None:
    engine = make(problem, torch.optim.ASGD)  # it averages the weights themselves
    train(engine, 12)
    assert moments(engine) > 0


def broken(problem: Any, train: Any, whole: bool) -> tuple[Engine, list[torch.Tensor]]:
    engine = make(problem)
    if whole:
        engine.cycle.keep_optimizer_state()
    train(engine, 5)
    assert engine.cycle.watch is not None
    engine.cycle.watch.lowest = math.inf
    train(engine, 10)
    start = [p.detach().clone() for p in engine.hosts[0][0].parameters()]
    with torch.no_grad():
        next(engine.hosts[0][0].parameters()).fill_(float("nan"))
    train(engine, 15)
    return engine, start


def test_after_a_window_that_was_lost_it_is_as_if_all_had_been_held(problem: Any, train: Any, assert_same: Any) -> None:
    """The guard's point is that of the last window here."""
    light, start = broken(problem, train, whole=False)
    heavy, _ = broken(problem, train, whole=True)
    assert light.history.windows[-1].faults[-1] == {"kind": "restored", "step": 10}
    assert all(torch.equal(p, q) for p, q in zip(light.hosts[0][0].parameters(), start, strict=True))
    assert_same(light.optimizers[0].state_dict(), heavy.optimizers[0].state_dict())
    train(light, STEPS)
    train(heavy, STEPS)
    assert_same(light.hosts[0][0].state_dict(), heavy.hosts[0][0].state_dict())


def test_where_the_guards_point_is_older_weights_are_the_last_and_moments_its(problem: Any, train: Any) -> None:
    engine = make(problem)
    train(engine, 5)
    watch = engine.cycle.watch
    assert watch is not None
    watch.lowest = -1.0  # no later window is better
    older = copy.deepcopy(engine.optimizers[0].state_dict()["state"][0]["exp_avg"])
    train(engine, 10)
    start = [p.detach().clone() for p in engine.hosts[0][0].parameters()]
    with torch.no_grad():
        next(engine.hosts[0][0].parameters()).fill_(float("nan"))
    train(engine, 15)
    assert all(torch.equal(p, q) for p, q in zip(engine.hosts[0][0].parameters(), start, strict=True))
    assert torch.equal(engine.optimizers[0].state_dict()["state"][0]["exp_avg"], older)


@pytest.mark.parametrize("steps", [10, 12])
def test_saved_between_windows_or_within_one_it_is_the_same_run(
    problem: Any, train: Any, assert_same: Any, steps: int
) -> None:
    """Also where the guard's point is older than the window's opening."""
    engine = make(problem)
    train(engine, 5)
    assert engine.cycle.watch is not None
    engine.cycle.watch.lowest = -1.0
    train(engine, steps)
    state = copy.deepcopy(engine.state_dict())
    train(engine, STEPS)
    again = make(problem)
    again.load_state_dict(state)
    train(again, STEPS)
    assert_same(again.hosts[0][0].state_dict(), engine.hosts[0][0].state_dict())


@pytest.mark.parametrize("broken", [False, True])
def test_a_point_saved_within_a_window_has_moments_of_that_window(problem: Any, train: Any, broken: bool) -> None:
    """With another number of replicas it is gone on from. Moments that are not finite are not saved for that."""
    engine = make(problem)
    train(engine, 5)
    assert engine.cycle.watch is not None
    engine.cycle.watch.lowest = -1.0
    train(engine, 22)
    rate = engine.cycle.anchor.optimizer_state()["param_groups"][0]["lr"]
    if broken:
        engine.optimizers[0].state_dict()["state"][0]["exp_avg"].fill_(float("nan"))
    point = engine.state_dict()["converged"]
    assert point["step"] == 20
    assert point["optimizer"]["param_groups"][0]["lr"] == rate
    assert float(point["optimizer"]["state"][0]["step"]) == (5 if broken else 22)
    assert point["optimizer"]["state"][0]["exp_avg"].isfinite().all()


def test_a_point_for_a_distributed_checkpoint_holds_the_openings_state(problem: Any, train: Any) -> None:
    engine = make(problem)
    stateful = hdet.checkpoints.Stateful(engine)
    train(engine, 5)
    assert engine.cycle.watch is not None
    engine.cycle.watch.lowest = -1.0
    train(engine, 7)
    stateful.state_dict()  # within a window: from the next on the state is held
    train(engine, 10)
    want = {name: own["exp_avg"].clone() for name, own in named(engine).items()}
    train(engine, 12)
    held = stateful.state_dict()["optimizer"]
    assert all(torch.equal(held[name]["exp_avg"], want[name]) for name in want)


def named(engine: Engine) -> dict[str, Any]:
    model, optimizer = engine.hosts[0]
    return {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}


def test_frozen_parameters_are_neither_averaged_nor_written_by_the_probe(problem: Any, train: Any) -> None:
    model = problem.model()
    first: nn.Module = model[0]
    first.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    engine = Engine(
        hdet.micro_batches(model, optimizer, 2),
        [hdet.LearningRate(schedule=Cosine(0.01, STEPS), evidence=hdet.evidence.Line(read_average_above=None))],
        window=5,
        signal=problem.probe(),
        guard=hdet.Rewind(),
    )
    versions = [p._version for p in first.parameters()]
    train(engine, 11)
    watch, window = engine.cycle.watch, Window(1, 5, 10)
    assert watch is not None
    assert not watch._is_lost(Harvest(window, np.ones(2), np.array([True, True])))
    trained = [p.shape for p in model.parameters() if p.requires_grad]
    assert [value.shape for value in engine.cycle.averages.follow(0, None).values] == trained
    assert [p._version for p in first.parameters()] == versions


def test_when_the_run_is_over_it_holds_nothing(problem: Any, train: Any) -> None:
    """A loop's last loss keeps the engine alive, by the hooks in its graph."""
    engine = make(problem, guard=None)
    train(engine, STEPS - 1)
    anchor = engine.cycle.anchor
    assert anchor._parameters
    assert anchor._state._states
    held = engine.state_dict()
    train(engine)
    assert engine.finished
    assert not anchor._parameters
    assert not anchor._state._states
    over = engine.state_dict()  # which does not need it
    assert over["converged"]["step"] == STEPS
    engine.load_state_dict(held)
    assert anchor.step == held["converged"]["step"]
    assert anchor._parameters
    train(engine)
    assert engine.finished
