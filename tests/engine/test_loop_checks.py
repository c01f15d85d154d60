"""What the engine asks of a training loop, and says where it is missing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import hdet
from hdet import Engine
from hdet.controllers import Hold
from hdet.errors import StepError
from hdet.spreads import TwoLevel


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


@pytest.mark.parametrize("way", ["of the optimizer", "of the model"])
def test_what_a_loop_writes_over_constant_values_is_noticed_in_any_step(problem: Any, train: Any, way: str) -> None:
    """Values that stay as they are, are not written again; after a state was loaded, or in a copy, neither."""

    def overwrite(engine: Engine, value: Any) -> None:
        model, optimizer = engine.hosts[0]
        if way == "of the model":
            model[2].p = value[0]
        else:
            optimizer.param_groups[0]["betas"] = value

    model = problem.model(torch.nn.Dropout(0.1))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.1, 0.95))
    still: dict[str, Any] = {"spread": TwoLevel(0.0), "controller": Hold()}
    knobs: list[Any] = [hdet.Beta1(**still), hdet.Beta2(**still), hdet.Dropout(**still)]
    home = hdet.micro_batches(model, optimizer, n=1)
    engine = Engine(home, knobs, window=200, signal=problem.probe())
    train(engine, 70)
    optimizer.load_state_dict(optimizer.state_dict())
    overwrite(engine, (float("0.1"), float("0.95")))  # the same number in another object
    train(engine, 73)
    for own in (copy.deepcopy(engine), engine):
        overwrite(own, (0.3, 0.95))
        with pytest.raises(StepError, match=r"hdet put 0\.1 into .*, and something else has made it 0\.3"):
            train(own, 74)


def test_a_group_that_is_gone_is_noticed(problem: Any, train: Any) -> None:
    model = problem.model()
    optimizer = torch.optim.SGD([{"params": [own]} for own in model.parameters()], lr=0.1)
    knob = hdet.LearningRate(spread=TwoLevel(0.0), controller=Hold())
    engine = Engine(hdet.micro_batches(model, optimizer, n=1), [knob], window=5)
    train(engine, 3)
    del optimizer.param_groups[-1]
    with pytest.raises(StepError, match="other parameter groups in step 3"):
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


def run_without(engine: Engine, problem: Any, *, stepping: int) -> None:
    """Two windows of the documented loop, in which only the first few optimizers are stepped."""
    for step in range(10):
        losses = []
        for replica in engine.replicas:
            with replica:
                loss = problem.loss(replica.model, problem.batch(step, replica.index))
                loss.backward()
            losses.append(loss.detach())
        engine.share_gradients()
        for number, optimizer in enumerate(engine.optimizers):
            if number < stepping:
                optimizer.step()
            optimizer.zero_grad()
        engine.step(losses)


@pytest.mark.parametrize(
    ("home", "stepping", "still"), [("copies", 0, "0, 1"), ("copies", 1, "1"), ("seats", 0, "0, 1")]
)
def test_a_loop_that_leaves_out_the_optimizers_step_is_told(
    problem: Any, home: str, stepping: int, still: str, recwarn: pytest.WarningsRecorder
) -> None:
    engine = engine_of(problem, hdet.replicate if home == "copies" else hdet.micro_batches)
    run_without(engine, problem, stepping=stepping)
    (warning,) = recwarn
    assert f"no weight of replica {still} has changed in steps 0 to 4" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize("home", ["copies", "seats"])
def test_a_loop_that_leaves_out_the_engines_step_is_told_once(
    problem: Any, home: str, recwarn: pytest.WarningsRecorder
) -> None:
    engine = engine_of(problem, hdet.replicate if home == "copies" else hdet.micro_batches)

    def train(steps: int, *, told: bool) -> None:
        for step in range(steps):
            losses = []
            for replica in engine.replicas:
                with replica:
                    losses.append(problem.loss(replica.model, problem.batch(step, replica.index)))
                    losses[-1].backward()
            engine.share_gradients()
            for optimizer in engine.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if told:
                engine.step(losses)

    train(4, told=True)
    train(9, told=False)
    train(2, told=True)
    assert not recwarn.list
    train(25, told=False)
    (warning,) = recwarn
    assert "engine.step was not called in between" in str(warning.message)
    assert warning.filename == __file__
    assert engine.step_count == 6


def test_weights_that_a_rate_of_zero_holds_are_no_fault(problem: Any, train: Any) -> None:
    """A window at rate 0 tells nothing; the next one does."""
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = Engine(hdet.micro_batches(model, optimizer, n=2), [], window=5, total_steps=15)
    train(engine, 5)
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.warns(UserWarning, match="no weight of replica 0, 1 has changed in steps 5 to 9"):
        run_without(engine, problem, stepping=0)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_loop_that_runs_a_compiled_model_is_told_of_plain_dropouts(problem: Any, swapped: bool) -> None:
    """`torch.compile(model)` leaves no mark on the model that the engine was given."""
    model = problem.model(torch.nn.Dropout(0.2))
    if swapped:
        hdet.nn.swap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(
        hdet.micro_batches(model, optimizer, n=1), [hdet.Dropout()], window=5, signal=problem.probe(), total_steps=10
    )
    compiled = torch.compile(model, backend="eager")

    def first_pass(called: Any) -> None:
        with engine.replicas[0]:
            problem.loss(called, problem.batch(0, 0)).backward()

    if swapped:
        first_pass(compiled)
    else:
        with pytest.raises(StepError, match=r"the loop runs what torch\.compile made of the model.*hdet\.nn\.swap"):
            first_pass(compiled)
    assert not any(module._forward_pre_hooks for module in model.modules())
    first_pass(model)
