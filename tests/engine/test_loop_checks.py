"""What the engine asks of a training loop, and says where it is missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hdet
from hdet import Engine
from hdet.errors import StepError


def engine_of(problem: Any, home: Any = hdet.replicate) -> Engine:
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Engine(home(model, optimizer, n=2), [hdet.LearningRate()], window=5, signal=problem.probe(), total_steps=10)


@pytest.mark.parametrize("home", [hdet.replicate, hdet.micro_batches])
@pytest.mark.parametrize("way", ["a group", "into a group"])
def test_parameters_that_join_an_optimizer_in_mid_run_are_refused(
    problem: Any, train: Any, home: Any, way: str
) -> None:
    engine = engine_of(problem, home)
    train(engine, 3)
    optimizer, more = engine.optimizers[-1], torch.nn.Parameter(torch.ones(2))
    if way == "a group":
        optimizer.add_param_group({"params": [more]})
    else:
        optimizer.param_groups[0]["params"].append(more)
    with pytest.raises(StepError, match=r"other parameter groups in step 3 .* instead of \[4\].*requires_grad_"):
        train(engine, 4)


def test_groups_that_are_there_from_the_start_may_train_later(problem: Any, train: Any) -> None:
    engine = engine_of(problem)
    for model, _ in engine.hosts:
        model[0].requires_grad_(False)
    train(engine, 3)
    for model, _ in engine.hosts:
        model[0].requires_grad_(True)
    train(engine)
    assert engine.finished
