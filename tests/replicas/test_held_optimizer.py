"""An optimizer's state held and put back: what is its own, and what is the user's or a scheduler's."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import prodigyopt
import pytest
import schedulefree
import torch
from torch import nn
from torch.optim import Optimizer

import hdet
from hdet.replicas.held_optimizer import HeldOptimizer, load
from hdet.replicas.optimizer_numbers import kept_in_groups

OPTIMIZERS: dict[str, tuple[Callable[[Any], Optimizer], set[str]]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), set()),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True), set()),
    "adamw_fused": (lambda p: torch.optim.AdamW(p, lr=0.1, fused=True), set()),
    "adafactor": (lambda p: torch.optim.Adafactor(p, lr=0.1), set()),
    "lbfgs": (lambda p: torch.optim.LBFGS(p, lr=0.1), set()),
    "schedule_free": (
        lambda p: schedulefree.AdamWScheduleFree(p, lr=0.1),
        {"k", "weight_sum", "lr_max", "scheduled_lr", "train_mode"},
    ),
    "prodigy": (lambda p: prodigyopt.Prodigy(p, lr=1.0), {"d", "d_max", "d_hat", "d_numerator", "d_denom", "k"}),
}


def made(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = OPTIMIZERS[name][0](model.parameters())
    if hasattr(optimizer, "train"):
        optimizer.train()
    return model, optimizer


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_it_keeps_in_its_groups_is_told_from_what_it_was_given(name: str) -> None:
    model, optimizer = made(name)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10, cycle_momentum=False)
    step(model, optimizer, 0)
    assert {key for _, key in kept_in_groups(optimizer)} == OPTIMIZERS[name][1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_put_back_it_goes_on_as_it_did(name: str, assert_same: Any) -> None:
    """The same two steps twice, the second time with the state put back; weights bit for bit."""
    model, optimizer = made(name)
    step(model, optimizer, 0)
    step(model, optimizer, 1)
    held, weights = HeldOptimizer(optimizer), copy.deepcopy(model.state_dict())
    held.take()
    found = []
    for _ in range(2):
        step(model, optimizer, 2)
        step(model, optimizer, 3)
        found.append((copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())))
        model.load_state_dict(weights)
        held.put_back(optimizer)
    assert_same(found[0], found[1])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_its_state_dict_is_the_optimizers(name: str, assert_same: Any) -> None:
    model, optimizer = made(name)
    step(model, optimizer, 0)
    held = HeldOptimizer(optimizer)
    held.take()
    want = copy.deepcopy(optimizer.state_dict())
    step(model, optimizer, 1)
    after = copy.deepcopy(optimizer.state_dict())
    assert_same(held.state_dict(), want)
    assert_same(optimizer.state_dict(), after)
    other = HeldOptimizer(optimizer)
    other.load_state_dict(want)
    assert_same(other.state_dict(), want)


def test_before_its_first_step_it_has_none_and_gets_none_back() -> None:
    model, optimizer = made("adamw")
    held = HeldOptimizer(optimizer)
    held.take()
    step(model, optimizer, 0)
    held.put_back(optimizer)
    assert not optimizer.state


class CountsInGroups(Optimizer):
    """It counts its steps in its groups, from the first one on."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                parameter.sub_(group["lr"] / group["step"])


def test_numbers_that_its_steps_made_in_the_groups_are_gone_where_there_were_none() -> None:
    optimizer = CountsInGroups([nn.Parameter(torch.ones(2))])
    held = HeldOptimizer(optimizer)
    held.take()
    hdet.clip_gradients(optimizer, 1.0)
    optimizer.step()
    optimizer.param_groups[0]["lr_mult"] = 0.5
    assert optimizer.param_groups[0]["step"] == 1
    held.put_back(optimizer)
    assert "step" not in optimizer.param_groups[0]
    assert optimizer.param_groups[0]["clip_norm"] == 1.0  # which is the user's, as the other is
    assert optimizer.param_groups[0]["lr_mult"] == 0.5


def test_a_state_of_no_parameter_is_gone_where_there_was_none() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer: Any = torch.optim.SGD([parameter], lr=0.1)
    held = HeldOptimizer(optimizer)
    held.take()
    optimizer.state["begun"] = True
    held.put_back(optimizer)
    assert not optimizer.state


class CountsItself(CountsInGroups):
    """It knows of its first step by an attribute, as DoG does."""

    def __init__(self, parameters: Any, rho: float = 0.05) -> None:
        super().__init__(parameters)
        self.first, self.rho = True, rho

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.first = False


@pytest.mark.parametrize("chained", [False, True])
def test_numbers_that_it_keeps_beside_its_state_are_put_back(chained: bool) -> None:
    own = CountsItself([nn.Parameter(torch.ones(2))])
    optimizer: Optimizer = own
    if chained:
        optimizer = hdet.ChainedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), own)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    held = HeldOptimizer(optimizer)
    held.take()
    for value in (True, False):
        assert own.first is value
        optimizer.step()
    own.rho = 0.2
    held.put_back(optimizer)
    assert own.first
    assert own.rho == 0.2, "an argument is the user's"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()  # which has seen the optimizer's steps


def test_a_state_called_z_alone_is_no_average_of_schedule_frees() -> None:
    """FTRL and D-Adaptation keep one, too."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter]["z"] = torch.full((2,), 7.0)
    held = HeldOptimizer(optimizer)
    held.take()
    assert not held.averages
    assert torch.equal(held.averaged([parameter], [parameter.detach()])[0], torch.ones(2))


@pytest.mark.parametrize("entry", ["lr", "weight_decay", "betas", "initial_lr", "clip_norm"])
def test_what_was_written_into_the_groups_since_stays(entry: str) -> None:
    _, optimizer = made("adamw")
    before = {"lr": 0.1, "weight_decay": 0.01, "betas": (0.9, 0.999), "initial_lr": 0.1}
    before["clip_norm"] = 1.0  # of `hdet.clip_gradients`
    optimizer.param_groups[0].update(before)
    held = HeldOptimizer(optimizer)
    held.take()
    written = (0.8, 0.9) if entry == "betas" else 0.03
    optimizer.param_groups[0][entry] = written
    held.put_back(optimizer)
    assert optimizer.param_groups[0][entry] == written


def test_a_state_dict_is_loaded_into_the_tensors_there_are(assert_same: Any) -> None:
    model, optimizer = made("adamw_fused")
    optimizer.param_groups[0]["lr"] = rate = torch.tensor(0.1)
    step(model, optimizer, 0)
    want = copy.deepcopy(optimizer.state_dict())
    step(model, optimizer, 1)
    rate.fill_(0.7)
    live = [t for own in optimizer.state.values() for t in own.values()]
    load(optimizer, want)
    assert_same(optimizer.state_dict(), want)
    assert all(a is b for a, b in zip(live, (t for own in optimizer.state.values() for t in own.values()), strict=True))
    assert optimizer.param_groups[0]["lr"] is rate
    step(model, optimizer, 1)
    assert want["param_groups"][0]["lr"].item() == pytest.approx(0.1)  # nothing of it is in use
    assert_same(want["state"][0]["step"], torch.tensor(1.0))


class Moments(NamedTuple):
    """What an optimizer may keep of a parameter under one key."""

    mean: torch.Tensor
    shape: torch.Size


def test_tuples_and_mappings_of_the_state_keep_their_type() -> None:
    model, optimizer = made("sgd")
    weight = next(model.parameters())
    optimizer.state[weight]["moments"] = Moments(torch.ones(2), torch.Size([2, 3]))
    optimizer.state[weight]["counts"] = Counter(skipped=2)
    held = HeldOptimizer(optimizer)
    held.take()
    optimizer.state[weight]["moments"].mean.zero_()
    held.put_back(optimizer)
    found = optimizer.state[weight]["moments"]
    assert isinstance(found, Moments)
    assert type(found.shape) is torch.Size
    assert found.mean.tolist() == [1.0, 1.0]
    assert optimizer.state[weight]["counts"]["never counted"] == 0
