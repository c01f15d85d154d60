"""The mean of optimizers' states, whoever of them has what."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import hdet
from hdet.replicas import optimizer_states
from hdet.replicas.anchor import Anchor
from hdet.replicas.finite import Finiteness

Model = torch.nn.Sequential


def stepped(n: int, make: Any = torch.optim.Adam, used: Any = lambda index: (0, 1)) -> list[Any]:
    """n optimizers of two parameters each, with one step each at another gradient."""
    optimizers = []
    for index in range(n):
        parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
        optimizer = make(parameters)
        for place in used(index):
            parameters[place].grad = torch.full_like(parameters[place], float(index + 1))
        optimizer.step()
        optimizers.append(optimizer)
    return optimizers


def entry(optimizer: Any, place: int, key: str) -> Any:
    return optimizer.state[optimizer.param_groups[0]["params"][place]].get(key)


def test_tensors_are_averaged_over_the_sound_and_given_to_all() -> None:
    optimizers = stepped(3)
    optimizers[1].state[optimizers[1].param_groups[0]["params"][0]]["exp_avg"].fill_(float("nan"))
    optimizer_states.average([optimizers[0], optimizers[2]], optimizers)
    for optimizer in optimizers:
        # Adam's first moment after one step is (1 - beta1) times the gradient; the gradients were 1 and 3.
        torch.testing.assert_close(entry(optimizer, 0, "exp_avg"), torch.full((2,), 0.1 * 2))
        torch.testing.assert_close(entry(optimizer, 1, "exp_avg_sq"), torch.full((3,), 0.001 * 5))


def of_scalars() -> list[torch.optim.Optimizer]:
    """Two optimizers of a parameter without dimensions, as a learned temperature is; their gradients were 1 and 3."""
    optimizers = []
    for index in range(2):
        parameter = torch.nn.Parameter(torch.tensor(1.0))
        parameter.grad = torch.tensor(1.0 + 2 * index)
        optimizers.append(torch.optim.Adam([parameter]))
        optimizers[-1].step()
    return optimizers


def test_moments_of_a_parameter_without_dimensions_are_averaged_and_its_steps_are_not() -> None:
    optimizers = of_scalars()
    entry(optimizers[1], 0, "step").fill_(8.0)
    optimizer_states.average(optimizers, optimizers)
    for optimizer in optimizers:
        torch.testing.assert_close(entry(optimizer, 0, "exp_avg"), torch.tensor(0.1 * 2))
        assert entry(optimizer, 0, "step") == 1.0


def test_a_moment_of_such_a_parameter_that_is_not_finite_enters_no_mean() -> None:
    (optimizer, _), model = of_scalars(), torch.nn.Module()
    (model.temperature,) = optimizer.param_groups[0]["params"]
    finiteness, anchor = Finiteness(model, optimizer), Anchor(model, optimizer)
    entry(optimizer, 0, "exp_avg_sq").fill_(float("inf"))
    anchor.take(1)
    assert finiteness.flags().tolist() == [True, False, True]
    assert not anchor.is_finite()


def test_complex_moments_are_averaged() -> None:
    optimizers = []
    for index in range(2):
        parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
        parameter.grad = torch.full((2,), (index + 1) * (1.0 + 2.0j))
        optimizers.append(torch.optim.SGD([parameter], lr=0.1, momentum=0.9))
        optimizers[-1].step()
    optimizer_states.average(optimizers, optimizers)
    for optimizer in optimizers:
        assert entry(optimizer, 0, "momentum_buffer").tolist() == [1.5 + 3.0j] * 2


def test_counters_are_taken_over_in_place() -> None:
    optimizers = stepped(2)
    optimizers[0].step()
    counter = entry(optimizers[1], 0, "step")
    optimizer_states.average(optimizers, optimizers)
    assert [entry(optimizer, 0, "step").item() for optimizer in optimizers] == [2.0, 2.0]
    assert entry(optimizers[1], 0, "step") is counter


def test_state_that_only_some_have_goes_to_all() -> None:
    """A parameter without a gradient in a replica has no state there."""
    optimizers = stepped(3, used=lambda index: (0,) if index == 0 else (1,))
    optimizer_states.average(optimizers, optimizers)
    for optimizer in optimizers:
        torch.testing.assert_close(entry(optimizer, 0, "exp_avg"), torch.full((2,), 0.1))
        torch.testing.assert_close(entry(optimizer, 1, "exp_avg"), torch.full((3,), 0.1 * 2.5))
    tensors = [entry(optimizer, 0, "exp_avg") for optimizer in optimizers]
    assert len({tensor.data_ptr() for tensor in tensors}) == 3


def test_what_no_sound_one_holds_none_keeps() -> None:
    """As on ranks: of the best replica alone all others become copies."""
    optimizers = stepped(2, used=lambda index: (0, 1) if index == 0 else (0,))
    optimizers[0].state[optimizers[0].param_groups[0]["params"][0]]["of_its_own"] = 1
    optimizer_states.average(optimizers[1:], optimizers)
    torch.testing.assert_close(*(optimizer.state_dict()["state"] for optimizer in optimizers), rtol=0.0, atol=0.0)


def test_a_parameter_without_state_anywhere_gets_none() -> None:
    optimizers = stepped(2, used=lambda index: (0,))
    optimizer_states.average(optimizers, optimizers)
    assert all(optimizer.param_groups[0]["params"][1] not in optimizer.state for optimizer in optimizers)
    plain = stepped(2, make=lambda p: torch.optim.SGD(p, lr=0.1))
    before = [copy.deepcopy(optimizer.state_dict()) for optimizer in plain]
    optimizer_states.average(plain, plain)
    assert [optimizer.state_dict() for optimizer in plain] == before


def test_numbers_that_are_the_optimizers_are_averaged_and_others_let_be() -> None:
    """Schedule-Free keeps such in its groups. A rate is somebody else's, and each replica keeps the one it has."""
    optimizers = stepped(2)
    for index, optimizer in enumerate(optimizers):
        group = optimizer.param_groups[0]
        group |= {"weight_sum": 1.0 + index, "k": 5 + index}
        group |= {"lr": 0.1 + index, "max_lr": 0.5 + index, "clip_norm": 1.0 + index}
    optimizer_states.average(optimizers, optimizers)
    for index, optimizer in enumerate(optimizers):
        group = optimizer.param_groups[0]
        assert (group["weight_sum"], group["k"]) == (1.5, 5)
        assert (group["lr"], group["max_lr"], group["clip_norm"]) == (0.1 + index, 0.5 + index, 1.0 + index)
        assert [p.shape[0] for p in group["params"]] == [2, 3]


@pytest.mark.parametrize("stepped_alone", [0, 1])
def test_numbers_that_a_step_makes_go_to_those_that_have_made_none(stepped_alone: int) -> None:
    """As where a GradScaler has skipped all of one's."""
    optimizers = stepped(2)
    optimizers[stepped_alone].param_groups[0] |= {"step": 3, "weight_sum": 0.5}
    optimizer_states.average(optimizers, optimizers, [1.0, 2.0])
    for optimizer in optimizers:
        assert (optimizer.param_groups[0]["step"], optimizer.param_groups[0]["weight_sum"]) == (3, 0.5)


def test_equal_numbers_stay_bit_for_bit() -> None:
    optimizers = stepped(3, make=lambda p: torch.optim.Adam(p, lr=0.1))
    optimizer_states.average(optimizers, optimizers)
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.1] * 3


def test_lists_and_other_objects_are_copied() -> None:
    optimizers = stepped(2)
    for index, optimizer in enumerate(optimizers):
        parameter = optimizer.param_groups[0]["params"][0]
        optimizer.state[parameter]["past"] = [torch.tensor(float(index))]
        optimizer.state[parameter]["nothing"] = None
    optimizer_states.average(optimizers, optimizers)
    assert [entry(optimizer, 0, "past")[0].item() for optimizer in optimizers] == [0.0, 0.0]
    assert entry(optimizers[0], 0, "past") is not entry(optimizers[1], 0, "past")


@pytest.mark.parametrize("n", [1, 2, 5])
def test_one_step_of_shared_gradients_leaves_nothing_to_average(n: int, problem: Any, train: Any) -> None:
    model = problem.model()
    replicas = hdet.replicate(model, torch.optim.Adam(model.parameters(), lr=0.1), n=n)
    engine = hdet.Engine(replicas, [], total_steps=3, window=5)
    train(engine, 2)
    before = [copy.deepcopy(own.state_dict()["state"]) for own in engine.optimizers]
    optimizer_states.average(engine.optimizers, engine.optimizers)
    for own, old in zip(engine.optimizers, before, strict=True):
        for index, state in own.state_dict()["state"].items():
            assert all(torch.equal(value, old[index][key]) for key, value in state.items())
