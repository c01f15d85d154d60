"""Weights averaged for evaluation: those that evidence keeps anyway."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import schedulefree
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import hdet
from hdet import Engine
from hdet.controllers import Hold
from hdet.errors import ConfigError
from hdet.replicas import tensors
from hdet.spreads import TwoLevel

WINDOW, TOTAL = 4, 10


def engine_of(problem: Any, n: int = 1, **options: Any) -> Engine:
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    home = hdet.micro_batches(model, optimizer, n=1) if n == 1 else hdet.replicate(model, optimizer, n=n)
    knob = hdet.LearningRate(evidence=hdet.evidence.Line(), controller=Hold())
    given = {"knobs": [knob], "window": WINDOW, "signal": problem.probe(), "total_steps": TOTAL, **options}
    return Engine(home, given.pop("knobs"), **given)


def weights_of(engine: Engine) -> list[Tensor]:
    return tensors.clones(tensors.parameters(engine.replicas[0].model))


def averaged(engine: Engine) -> list[Tensor]:
    before = weights_of(engine)
    with engine.averaged():
        found = weights_of(engine)
    assert all(map(torch.equal, weights_of(engine), before))
    return found


def close(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.allclose(*pair, atol=1e-6) for pair in zip(some, others, strict=True))


def test_it_is_what_torchs_averaged_model_makes_of_the_same_steps(problem: Any, train: Any) -> None:
    """After a window, within one, and at the end."""
    engine = engine_of(problem)
    model = engine.replicas[0].model
    for start, stop in ((0, 4), (4, 8), (8, 9), (9, TOTAL)):
        if start != 9:
            swa = AveragedModel(model)
        train(engine, stop, after_update=lambda step, swa=swa: swa.update_parameters(model))
        assert close(averaged(engine), list(swa.module.parameters()))


def test_replicas_that_came_apart_are_averaged_together(problem: Any, train: Any) -> None:
    engine = engine_of(problem, n=3, gradients="local")
    rows: list[list[Tensor]] = []
    train(
        engine,
        WINDOW,
        after_update=lambda step: rows.extend(tensors.clones(tensors.parameters(m)) for m, _ in engine.hosts),
    )
    assert close(averaged(engine), [torch.stack(same).mean(dim=0) for same in zip(*rows, strict=True)])


def test_no_second_copy_is_held(problem: Any, train: Any) -> None:
    """Neither after it was asked for, nor for an optimizer that keeps an average itself."""
    engine = engine_of(problem)
    train(engine, WINDOW)
    held = [t.data_ptr() for mean in engine.cycle.averages.means.values() for t in mean.values]
    size = sum(p.numel() for p in engine.replicas[0].model.parameters())
    assert sum(t.numel() for mean in engine.cycle.averages.means.values() for t in mean.values) == size
    averaged(engine)
    assert [t.data_ptr() for mean in engine.cycle.averages.means.values() for t in mean.values] == held

    model = problem.model()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01)
    optimizer.train()
    home = hdet.micro_batches(model, optimizer, n=1)
    knob = hdet.LearningRate(evidence=hdet.evidence.Line(), controller=Hold())
    engine = Engine(home, [knob], window=WINDOW, signal=problem.probe(), total_steps=TOTAL)
    train(engine, WINDOW + 1)
    found = averaged(engine)
    assert not any(mean.values for mean in engine.cycle.averages.means.values())
    own = copy.deepcopy((model, optimizer))
    own[1].eval()
    assert close(found, list(own[0].parameters()))


def test_where_there_is_none_the_weights_are_as_they_are(problem: Any, train: Any) -> None:
    """As the run begins, and after all became non-finite."""
    engine = engine_of(problem)
    assert close(averaged(engine), weights_of(engine))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found: Tensor = problem.loss(model, batch) * float("nan")
        return found

    train(engine, WINDOW)
    train(engine, 2 * WINDOW, loss=loss)
    assert close(averaged(engine), weights_of(engine))


def failing_at(step: int, engine: Engine, problem: Any, replicas: tuple[int, ...]) -> Any:
    """The loss, which is NaN for some replicas from a step on."""
    bad = [engine.replicas[index].model for index in replicas]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        own: Tensor = problem.loss(model, batch)
        return own * float("nan") if model in bad and engine.step_count >= step else own

    return loss


@pytest.mark.parametrize("stop", [3, WINDOW, WINDOW + 1, TOTAL])
def test_a_replica_that_failed_takes_no_part(stop: int, problem: Any, train: Any) -> None:
    """Within the window, after it and at the run's end."""
    engine = engine_of(problem, n=3, gradients="local")
    rows: list[tuple[int, list[Tensor]]] = []

    def after(step: int) -> None:
        rows.extend((step, tensors.clones(tensors.parameters(engine.hosts[host][0]))) for host in (0, 2))

    failed_at = {3: 2, WINDOW: 2, WINDOW + 1: 2, TOTAL: 9}[stop]
    train(engine, min(stop, WINDOW) if stop != TOTAL else stop, loss=failing_at(failed_at, engine, problem, (1,)),
          after_update=after)  # fmt: skip
    if stop == WINDOW + 1:
        train(engine, stop, after_update=after)
    first = {3: 0, WINDOW: 0, WINDOW + 1: WINDOW, TOTAL: 8}[stop]
    sound = [row for step, row in rows if step >= first]
    if stop == WINDOW + 1:
        sound.append(tensors.clones(tensors.parameters(engine.hosts[1][0])))
    expected = [torch.stack(same).mean(dim=0) for same in zip(*sound, strict=True)]
    for host in range(3):
        with engine.averaged():
            assert close(tensors.clones(tensors.parameters(engine.hosts[host][0])), expected)


def test_where_all_failed_within_a_window_the_weights_are_as_they_are(problem: Any, train: Any) -> None:
    engine = engine_of(problem, n=2, gradients="local")
    train(engine, 3, loss=failing_at(1, engine, problem, (0, 1)))
    with engine.averaged():
        assert not any(value.isfinite().all() for value in weights_of(engine))


def test_of_a_state_taken_up_in_a_used_engine_there_is_none(problem: Any, train: Any) -> None:
    engine = engine_of(problem)
    train(engine, WINDOW)
    state = copy.deepcopy(engine.state_dict())
    train(engine, 2 * WINDOW - 1)
    engine.load_state_dict(state)
    assert close(averaged(engine), weights_of(engine))


def test_where_all_failed_in_the_last_window_there_is_none(problem: Any, train: Any) -> None:
    engine = engine_of(problem)
    train(engine, loss=failing_at(9, engine, problem, (0,)))
    assert engine.finished
    assert engine.history.latest[-1].faults[-1]["kind"] == "restored"
    assert close(averaged(engine), weights_of(engine))


def test_schedule_free_replicas_that_came_apart_are_averaged_together(problem: Any, train: Any) -> None:
    """The mean of their own averages, though no evidence keeps one."""
    model = problem.model()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.05)
    optimizer.train()
    knob = hdet.LearningRate(spread=TwoLevel(0.3))
    engine = Engine(hdet.replicate(model, optimizer, n=2), [knob], window=WINDOW, gradients="local", total_steps=TOTAL)
    train(engine, 3)
    own = []
    for host in engine.hosts:
        with tensors.evaluated_weights(*host):
            own.append(tensors.clones(tensors.parameters(host[0])))
    assert not close(*own)
    expected = [torch.stack(same).mean(dim=0) for same in zip(*own, strict=True)]
    for host in range(2):
        with engine.averaged():
            assert close(tensors.clones(tensors.parameters(engine.hosts[host][0])), expected)


def test_without_evidence_that_averages_it_is_refused(problem: Any) -> None:
    engine = engine_of(problem, n=2, knobs=[hdet.LearningRate(spread=TwoLevel(0.1))])
    with pytest.raises(ConfigError, match="nothing here averages weights"), engine.averaged():
        pass
