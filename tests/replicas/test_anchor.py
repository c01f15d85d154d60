"""The last converged point: taken, held apart from the model, put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hdet.replicas.anchor import Anchor


@pytest.fixture
def pair(problem: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = problem.model(nn.BatchNorm1d(6))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(problem: Any, model: nn.Module, optimizer: Any, number: int) -> None:
    problem.loss(model, problem.batch(number, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("device", [None, "cpu"])
def test_restoring_brings_back_parameters_buffers_and_optimizer(
    device: Any, pair: Any, problem: Any, assert_same: Any
) -> None:
    model, optimizer = pair
    anchor = Anchor(model, optimizer, device)
    for number in range(2):  # the second time into memory it has
        step(problem, model, optimizer, number)
        anchor.take(number + 1)
    want = anchor.state_dict()
    assert want["step"] == 2
    for number in range(2, 5):
        step(problem, model, optimizer, number)
    assert model[2].num_batches_tracked == 5
    assert_same(anchor.state_dict(), want)
    anchor.restore(model, optimizer)
    assert_same(model.state_dict(), want["model"])
    assert_same(optimizer.state_dict(), want["optimizer"])
    step(problem, model, optimizer, 5)
    assert_same(anchor.state_dict(), want)


def test_asking_for_its_state_leaves_the_model_as_it_is(pair: Any, problem: Any, assert_same: Any) -> None:
    model, optimizer = pair
    anchor = Anchor(model, optimizer)
    anchor.take(0)
    step(problem, model, optimizer, 0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = anchor.state_dict()
    assert_same(model.state_dict(), before)
    assert not torch.equal(state["model"]["0.weight"], model[0].weight)


def test_its_parameters_are_in_the_order_of_the_models(pair: Any) -> None:
    model, optimizer = pair
    model.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    anchor = Anchor(model, optimizer)
    anchor.take(0)
    held = anchor.parameters()
    live = [p for p in model.parameters() if p.numel()]
    assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in zip(held, live, strict=True))


def test_a_tensor_rate_is_held_by_value(problem: Any) -> None:
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
    anchor = Anchor(model, optimizer)
    anchor.take(0)
    optimizer.param_groups[0]["lr"].fill_(0.5)
    anchor.restore(model, optimizer)
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(0.1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_the_host_it_takes_no_device_memory(problem: Any) -> None:
    model = nn.Linear(1000, 1000, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1000, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = torch.cuda.memory_allocated()
    anchor = Anchor(model, optimizer, "cpu")
    anchor.take(0)
    assert torch.cuda.memory_allocated() == before
    anchor.restore(model, optimizer)
    assert optimizer.state[model.weight]["exp_avg"].is_cuda
