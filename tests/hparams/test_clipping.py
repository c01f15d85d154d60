"""Gradient clipping inside the step: torch's own, by a threshold that a knob can move."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import hdet
from hdet.controllers import Hold
from hdet.errors import ConfigError, MatchError

STEPS, NORM = 6, 0.7
Make = Callable[[nn.Module], Optimizer]
MAKES: dict[str, Make] = {
    "sgd": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda m: AdamW(m.parameters(), lr=0.1, fused=True),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def loss_at(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
    loss: Tensor = (model(x) - 3.0).square().mean()
    return loss


def by_torch(make: Make, norm: float, steps: int = STEPS) -> list[Tensor]:
    model = net()
    optimizer = make(model)
    for step in range(steps):
        loss_at(model, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def train(model: nn.Module, optimizer: Optimizer, closures: bool = False) -> list[Tensor]:
    for step in range(STEPS):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            loss = loss_at(model, step)
            loss.backward()
            return loss.item()

        if closures:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("closures", [False, True])
@pytest.mark.parametrize("name", list(MAKES))
def test_it_is_torchs_clipping_bit_for_bit(name: str, closures: bool) -> None:
    model = net()
    optimizer = MAKES[name](model)
    clipping = hdet.clip_gradients(optimizer, norm=NORM)
    assert equal(train(model, optimizer, closures), by_torch(MAKES[name], NORM))
    assert clipping.total_norm is not None
    assert clipping.total_norm > NORM


@pytest.mark.parametrize("closures", [False, True])
@pytest.mark.parametrize("name", list(MAKES))
def test_under_attach_the_threshold_that_was_learned_is_in_force_in_the_step_alone(name: str, closures: bool) -> None:
    """Clipping comes after the hook that puts it there, though it was asked for before."""
    model = net()
    optimizer = MAKES[name](model)
    hdet.clip_gradients(optimizer, norm=NORM)
    probe = hdet.Probe(lambda model, x: (model(x) - 3.0).square().mean(1), [torch.ones(4, 3), torch.zeros(4, 3)])
    knob = hdet.ClipNorm(initial_shift=-math.log(4.0), controller=Hold())
    rate = ["learning_rate", "weight_decay"][: 1 if name == "sgd" else 2]
    search = hdet.attach(
        model,
        optimizer,
        probe=probe,
        schedule=None,
        knobs=[knob],
        exclude=rate,
        micro_batches=1,
        guard=None,
        quiet=True,
    )
    assert equal(train(model, optimizer, closures), by_torch(MAKES[name], NORM / 4.0))
    assert [group["clip_norm"] for group in optimizer.param_groups] == [NORM]
    search.detach()


def test_a_state_of_a_time_without_clipping_keeps_the_threshold() -> None:
    model = net()
    optimizer = MAKES["sgd"](model)
    before = copy.deepcopy(optimizer.state_dict())
    hdet.clip_gradients(optimizer, norm=NORM)
    optimizer.load_state_dict(before)
    assert equal(train(model, optimizer), by_torch(MAKES["sgd"], NORM))


def test_after_a_state_of_a_time_without_clipping_a_knob_finds_the_threshold() -> None:
    model = net()
    optimizer = MAKES["sgd"](model)
    before = copy.deepcopy(optimizer.state_dict())
    hdet.clip_gradients(optimizer, norm=NORM)
    optimizer.load_state_dict(before)
    assert hdet.ClipNorm().bind(model, optimizer).read() == NORM


def test_asked_for_again_it_clips_once_to_the_new_norm_and_removed_not_at_all() -> None:
    model = net()
    optimizer = MAKES["sgd"](model)
    groups = [dict(group) for group in optimizer.param_groups]
    defaults = dict(optimizer.defaults)
    first = hdet.clip_gradients(optimizer, norm=9.0)
    assert hdet.clip_gradients(optimizer, norm=NORM) is first
    assert equal(train(model, optimizer), by_torch(MAKES["sgd"], NORM))
    first.remove()
    assert optimizer.param_groups == groups
    assert optimizer.defaults == defaults
    assert not optimizer._optimizer_step_pre_hooks


def test_a_group_that_is_added_later_has_the_threshold() -> None:
    model = net()
    optimizer = SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    hdet.clip_gradients(optimizer, norm=NORM)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    assert equal(train(model, optimizer), by_torch(MAKES["sgd"], NORM))


@pytest.mark.parametrize("norm", [0.0, -1.0, math.inf, math.nan, True, "1"])
def test_what_is_no_threshold_is_refused(norm: Any) -> None:
    with pytest.raises(ConfigError, match="is no threshold that gradients could be clipped to"):
        hdet.clip_gradients(MAKES["sgd"](net()), norm=norm)


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be a torch\.optim\.Optimizer, got list"):
        hdet.clip_gradients([], norm=1.0)  # type: ignore[arg-type]


def test_a_knob_without_clipping_names_the_way_out() -> None:
    model = net()
    with pytest.raises(MatchError, match=r"call hdet\.clip_gradients\(optimizer, norm=1\.0\)"):
        hdet.ClipNorm().bind(model, MAKES["sgd"](model))


def test_one_norm_is_not_that_of_some_groups() -> None:
    with pytest.raises(ConfigError, match="one norm is that of all parameters"):
        hdet.ClipNorm(groups=0)


@pytest.mark.filterwarnings("ignore:hdet was told no training loss")
def test_a_threshold_in_a_saved_state_is_no_wish_to_clip() -> None:
    """An optimizer that was clipped in another run, or whose groups hold an entry of that name by chance."""
    model, clipped, attached = (net() for _ in range(3))
    optimizer = MAKES["sgd"](clipped)
    hdet.clip_gradients(optimizer, norm=1e-3)
    plain, searched = MAKES["sgd"](model), MAKES["sgd"](attached)
    for own in (plain, searched):
        own.load_state_dict(optimizer.state_dict())
    probe = hdet.Probe(lambda model, step: loss_at(model, step), [-1, -2])
    held = hdet.LearningRate(controller=hdet.controllers.Hold())
    options: dict[str, Any] = {"schedule": None, "knobs": [held], "tail": None, "guard": None, "quiet": True}
    with hdet.attach(attached, searched, probe=probe, total_steps=STEPS, **options):
        found = train(attached, searched)
    assert equal(found, train(model, plain))
