"""Which of a model's weights a search's state holds: those that training changes, wherever it would go back to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.replicas import tensors

State = dict[str, Any]


def without_frozen(state: State, model: nn.Module, optimizer: Optimizer) -> State:
    """An engine's state whose points and replicas lack the frozen parameters; under `"frozen"` it names them.

    Of a model that is frozen but for its LoRA adapters, the adapters are left. A frozen parameter that has changed all
    the same since one of the points (a teacher that follows by moving averages) stays.
    """
    live = _frozen(model, optimizer)
    changed: set[str] = set()

    def compared(part: Mapping[str, Any]) -> Mapping[str, Any]:
        changed.update(name for name, parameter in live.items() if not _same(part.get(name), parameter))
        return part

    _each_model(state, compared)
    names = live.keys() - changed
    without = _each_model(state, lambda part: {name: entry for name, entry in part.items() if name not in names})
    return {**without, "frozen": sorted(names)}


def with_frozen(state: State, model: nn.Module) -> State:
    """The state with the parameters that it lacks, as the model has them now."""
    live = model.state_dict()
    lacking = {name: live[name] for name in state.get("frozen", ()) if name in live}
    return _each_model(state, lambda part: {**lacking, **part})


def written_since(state: State, model: nn.Module) -> dict[str, Tensor]:
    """What a loop has written into the model after the step at which a window opened, as a teacher that follows.

    Empty within a window: the state then holds the model as it is.
    """
    opened = state["converged"]["model"]
    live = model.state_dict() if state["open"] is None else {}
    return {
        name: value.clone()
        for name, value in live.items()
        if isinstance(value, Tensor) and name in opened and not _same(opened[name], value)
    }


def _frozen(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad and id(parameter) not in trained
    }


def _same(held: Any, live: Tensor) -> bool:
    if not isinstance(held, Tensor):
        return False
    one, other = tensors.local(held), tensors.local(live)
    return one.shape == other.shape and torch.equal(one.to(other.device), other)


def _each_model(state: State, change: Callable[[Mapping[str, Any]], Any]) -> State:
    """A copy of an engine's state, in which every model's state dict is changed."""

    def part(given: Any) -> Any:
        return given if given is None else {**given, "model": change(given["model"])}

    under_way, watch = state["open"], state["watch"]
    return {
        **state,
        "converged": part(state["converged"]),
        "opening": _parts(state["opening"], part),
        "open": under_way if under_way is None else {**under_way, "replicas": _parts(under_way["replicas"], part)},
        "watch": watch if watch is None else {**watch, "held": part(watch["held"]), "first": part(watch["first"])},
    }


def _parts(replicas: Any, part: Callable[[Any], Any]) -> Any:
    return replicas if replicas is None else {index: part(given) for index, given in replicas.items()}
