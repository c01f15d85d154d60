"""A model's and an optimizer's state by the names of parameters: the same structure at every moment of a run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.hparams.param_groups import parameters_of
from hdet.replicas import tensors
from hdet.replicas.chained_optimizer import steps_by
from hdet.replicas.made_state import made_state

Named = dict[str, Any]


def model_by_name(model: nn.Module, held: list[Tensor]) -> Named:
    """The model's state dict with the held tensors in place of its own."""
    tensors.reshard(model)
    live = [*model.parameters(), *model.buffers()]
    place = {id(tensor): number for number, tensor in enumerate(live)}
    return {
        name: tensors.sharded_as(held[place[id(value)]], value) if id(value) in place else value
        for name, value in model.state_dict(keep_vars=True).items()
    }


def optimizer_by_name(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], wanted: Collection[str] | None = None
) -> tuple[dict[str, Named], list[str]]:
    """State by parameter name, complete: zeros stand in for parameters that have none yet, which are listed too.

    Args:
        wanted: the parameters that it is of; by default those that have a state or are trained.
    """
    found: dict[str, Named] = {}
    stateless: list[str] = []
    names = list(_names(model, optimizer))
    indices = [index for group in state["param_groups"] for index in group["params"]]
    parameters = parameters_of(optimizer)
    held = state["state"]
    asked = {
        each: each.requires_grad or bool(held.get(index)) if wanted is None else name in wanted
        for name, index, each in zip(names, indices, parameters, strict=True)
    }
    group_of = {each: number for number, group in enumerate(optimizer.param_groups) for each in group["params"]}
    stepped_by = {each: steps_by(optimizer, optimizer.param_groups[number]) for each, number in group_of.items()}
    # Parameters of one kind have states with the same entries, of the same shapes.
    kinds = {each: (number, each.shape, each.dtype) for each, number in group_of.items()}
    samples: dict[tuple[int, torch.Size, torch.dtype], tuple[Named, nn.Parameter]] = {}
    made: dict[nn.Parameter, Named] | None = None
    for index, parameter in zip(indices, parameters, strict=True):
        # The point may be from before the first step.
        entries = held.get(index) or optimizer.state.get(parameter)
        if entries:
            samples.setdefault(kinds[parameter], (dict(entries), parameter))
    for parameter in parameters:
        if not asked[parameter] or kinds[parameter] in samples:
            continue
        group = optimizer.param_groups[group_of[parameter]]
        entries = made_state(stepped_by[parameter], group, torch.zeros_like(parameter))
        if entries is not None:
            samples[kinds[parameter]] = (entries, parameter)
        elif not optimizer.state and made is None:
            made = _made(optimizer, asked)
            samples.update({kinds[each]: (own, each) for each, own in made.items()})
        # Else the state of another shape, that tells most: of no dimensions a step count has the parameter's shape.
        others = [one for one in samples.values() if stepped_by[one[1]] is stepped_by[parameter]]
        samples.setdefault(kinds[parameter], max(others, key=lambda one: one[1].dim(), default=({}, parameter)))
    for name, index, parameter in zip(names, indices, parameters, strict=True):
        if held.get(index) and asked[parameter]:
            found[name] = dict(held[index])
            continue
        stateless.append(name)
        entries, owner = samples.get(kinds[parameter], ({}, parameter))
        if asked[parameter] and entries:
            found[name] = {key: _zeros(value, owner, parameter) for key, value in entries.items()}
    return found, stateless


def optimizer_state(
    model: nn.Module, optimizer: Optimizer, named: Mapping[str, Named], control: Mapping[str, Any]
) -> dict[str, Any]:
    """An optimizer's state dict from its state by parameter name."""
    states: dict[int, Any] = {}
    groups = []
    numbered = iter(_names(model, optimizer))
    for group, saved in zip(optimizer.state_dict()["param_groups"], control["groups"], strict=True):
        for index in group["params"]:
            name = next(numbered)
            if name in named and name not in control["stateless"]:
                states[index] = named[name]
        kept = {key: group[key] for key in group if key not in saved}
        groups.append({**saved, **kept, "params": group["params"]})
    return {"state": states, "param_groups": groups}


def _names(model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    """The names of the optimizer's parameters, in the order of its groups."""
    tensors.reshard(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names[id(parameter)]


def _made(optimizer: Optimizer, asked: Mapping[nn.Parameter, bool]) -> dict[nn.Parameter, Named]:
    """What an optimizer without a state makes of parameters, found by an update of nothing at learning rate zero."""
    parameters = [parameter for parameter in parameters_of(optimizer) if asked[parameter]]
    gradients = [parameter.grad for parameter in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    before = tensors.clones([tensors.local(parameter.detach()) for parameter in parameters])
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        optimizer.step()
        return {each: dict(optimizer.state[each]) for each in parameters if optimizer.state.get(each)}
    finally:
        optimizer.state.clear()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        tensors.copy_([tensors.local(parameter.detach()) for parameter in parameters], before)


def _zeros(value: Any, owner: nn.Parameter, parameter: nn.Parameter) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.zeros_like(parameter, dtype=value.dtype) if value.shape == owner.shape else torch.zeros_like(value)
