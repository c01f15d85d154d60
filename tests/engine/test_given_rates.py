"""What a knob sets out from: what the user gave, not what an earlier engine or a scheduler left in the optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import hdet
from hdet import Engine
from hdet.errors import CheckpointError, ConfigError
from hdet.schedules import OneCycle

STEPS = 20


def pair(problem: Any, **options: Any) -> tuple[nn.Module, Optimizer]:
    model = problem.model()
    return model, torch.optim.AdamW(model.parameters(), **{"lr": 0.02, "weight_decay": 0.1, **options})


def recipe(problem: Any, model: nn.Module, optimizer: Optimizer, **options: Any) -> Engine:
    return hdet.recommended(model, optimizer, total_steps=STEPS, probe=problem.probe(), quiet=True, **options)


@pytest.mark.parametrize("rate", [0.02, torch.tensor(0.02)])
def test_a_cell_that_runs_twice_explores_around_the_same_peak(rate: Any, problem: Any, train: Any) -> None:
    model, optimizer = pair(problem, lr=copy.deepcopy(rate))
    first = recipe(problem, model, optimizer)
    train(first)
    assert float(optimizer.param_groups[0]["lr"]) < 0.01  # annealed
    second = recipe(problem, model, optimizer)
    assert {name: own.start for name, own in second.learned.items()} == {
        name: own.start for name, own in first.learned.items()
    }


def test_knobs_without_a_schedule_set_out_from_what_was_given_too(problem: Any, train: Any) -> None:
    model, optimizer = pair(problem)
    knobs = [hdet.WeightDecay()]
    engine = Engine(hdet.micro_batches(model, optimizer, 1), knobs, window=5, total_steps=STEPS, signal=problem.probe())
    train(engine, 3)
    engine.cycle.knobs[0].write(0, 0.7)
    again = Engine(hdet.micro_batches(model, optimizer, 1), knobs, window=5, total_steps=STEPS, signal=problem.probe())
    assert again.learned["weight_decay"].start == 0.1


def test_a_rate_that_the_user_sets_in_between_counts(problem: Any, train: Any) -> None:
    model, optimizer = pair(problem)
    train(recipe(problem, model, optimizer))
    optimizer.param_groups[0]["lr"] = 0.005
    assert recipe(problem, model, optimizer).learned["learning_rate"].start == 0.005


def test_a_point_of_a_schedulers_course_is_not_taken_for_its_peak(problem: Any) -> None:
    model, optimizer = pair(problem)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=STEPS)
    message = (
        r"scheduler.*'initial_lr'.*0\.0008.*schedule=hdet\.schedules\.OneCycle.*hdet\.attach\(\.\.\., scheduler=sch"
    )
    with pytest.raises(ConfigError, match=message):
        recipe(problem, model, optimizer)
    seats = hdet.micro_batches(model, optimizer, 1)
    with pytest.raises(ConfigError, match="learning_rate: lr is driven by a torch " + message):
        Engine(seats, [hdet.LearningRate()], total_steps=STEPS, signal=problem.probe())
    with pytest.raises(ConfigError, match=r"beta1: betas is driven by a torch scheduler.*'max_momentum'"):
        Engine(seats, [hdet.Beta1()], total_steps=STEPS, signal=problem.probe())
    own = recipe(problem, model, optimizer, schedule=OneCycle(0.02, total_steps=STEPS))
    assert own.learned["learning_rate"].start == 0.02


def test_groups_that_a_warm_up_starts_at_0_keep_the_ratio_they_were_given(problem: Any) -> None:
    """As Hugging Face's schedules do."""
    model = problem.model()
    groups = [{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[2].parameters(), "lr": 1e-4}]
    optimizer = torch.optim.AdamW(groups)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]
    knob = hdet.LearningRate(schedule=OneCycle(2e-3, total_steps=STEPS))
    engine = Engine(hdet.micro_batches(model, optimizer, 1), [knob], total_steps=STEPS, signal=problem.probe())
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates[0] == engine.bases["learning_rate"] > 0.0
    assert rates[1] == pytest.approx(0.1 * rates[0], rel=1e-12)


def test_a_schedule_around_another_peak_is_refused_on_resume(problem: Any, train: Any, assert_same: Any) -> None:
    """As after loading the optimizer's own state, which holds the rate of that moment, before the engine was made."""
    model, optimizer = pair(problem)
    engine = recipe(problem, model, optimizer)
    train(engine, 15)
    state = copy.deepcopy(engine.state_dict())
    resumed, other = pair(problem)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(
        CheckpointError,
        match=r"written with the schedule .*'peak': 0\.02.* of 'learning_rate'.*make the engine before the optimizer's",
    ):
        recipe(problem, resumed, other).load_state_dict(copy.deepcopy(state))
    resumed, other = pair(problem)
    second = recipe(problem, resumed, other)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # after it does no harm
    second.load_state_dict(state)
    train(engine)
    train(second)
    assert_same(resumed.state_dict(), model.state_dict())
