"""Which of a model's weights a search's state holds: those that training changes, wherever it would go back to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hdet.engine import snapshot
from hdet.engine.cycle import Cycle
from hdet.hparams.param_groups import ids_of
from hdet.nn.names import named_parameters
from hdet.replicas import tensors
from hdet.replicas.dense import is_dense

State = dict[str, Any]


def state_without_frozen(cycle: Cycle) -> State:
    """An engine's state whose points and replicas lack the frozen parameters; under `"frozen"` it names them.

    Of a model that is frozen but for its LoRA adapters, the adapters are left. A frozen parameter that has changed all
    the same since one of the points (a teacher that follows by moving averages) stays.
    """
    names = _unchanged(cycle)
    return {**snapshot.state_dict(cycle, leave_out=names), "frozen": names}


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


def _unchanged(cycle: Cycle) -> list[str]:
    """The frozen parameters that every point and every replica holds as the first model does now, sorted."""
    (model, optimizer), *others = cycle.hosts
    trained = ids_of(optimizer)
    frozen = {
        name: parameter
        for name, parameter in named_parameters(model)
        if not parameter.requires_grad and id(parameter) not in trained
    }
    points = [cycle.anchor, *(cycle.watch.points if cycle.watch is not None else ())]
    held = [dict(zip(frozen, point.values(list(frozen.values())), strict=True)) for point in points]
    held += [dict(named_parameters(other)) for other, _ in others]
    return sorted(name for name, own in frozen.items() if all(_same(part[name], own) for part in held))


def _same(held: Any, live: Tensor) -> bool:
    if not isinstance(held, Tensor):
        return False
    one, other = tensors.local(held.detach()), tensors.local(live.detach())
    if held is live or not is_dense(one):
        return True  # nothing is held of what cannot be written over
    if one.data_ptr() == other.data_ptr() and one.shape == other.shape:
        return True  # nothing is held of what nothing changes: it is the model's own
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
