"""An engine's converged point for torch.distributed.checkpoint: sharded over ranks, loadable by any number of them."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet import checkpoint
from hdet.errors import CheckpointError
from hdet.replicas import tensors

if TYPE_CHECKING:
    from hdet.engine import Engine

Named = dict[str, Any]


class Stateful:
    """What `torch.distributed.checkpoint` saves and loads of an engine: always the last converged point.

        dcp.save({"hdet": hdet.Stateful(engine)}, checkpoint_id="checkpoints/step_1000")
        dcp.load({"hdet": hdet.Stateful(engine)}, checkpoint_id="checkpoints/step_1000")

    `dcp.async_save` works too: it copies before it returns. Sharded tensors are stored as shards, each once, and
    are cut anew for the ranks that load them; the number of ranks, of shards and of replicas may differ. A window
    under way is run again from its opening. (torch.distributed.checkpoint takes the replicas of a sharded tensor
    for identical. Given a model whose replicas have come apart it would store a mix of them.)

    The structure is fixed, whatever the moment: it is the template that loading fills.

    - `model`: parameters and buffers by name, as in the model's own state dict.
    - `optimizer`: by parameter name, its state's tensors.
    - `control`: bytes by `torch.save` of plain numbers: window, step, bases, controllers, parameter groups.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def state_dict(self) -> dict[str, Any]:
        """References to the point, not copies; valid until the next window closes."""
        model, optimizer = self.engine.hosts[0]
        self.engine.settle()
        if self.engine.finished:
            tensors.reshard(model)
            step, state = self.engine.step_count, optimizer.state_dict()
            held = [tensors.local(t.detach()) for t in (*model.parameters(), *model.buffers())]
        else:
            anchor = self.engine.anchor
            step, state, held = anchor.step, anchor.optimizer_state, anchor.held
        named_state, stateless = _optimizer_by_name(model, optimizer, state)
        return {
            "model": _model_by_name(model, held),
            "optimizer": named_state,
            "control": _packed(self._control(step, state, stateless)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the point.

        Raises:
            CheckpointError: it is another engine's.
        """
        control = torch.load(io.BytesIO(state["control"]), weights_only=True)
        model, optimizer = self.engine.hosts[0]
        own = optimizer.state_dict()["param_groups"]
        if [len(group["params"]) for group in own] != control["sizes"]:
            raise CheckpointError(
                f"the checkpoint's optimizer has parameter groups of {control['sizes']} parameters, this one of "
                f"{[len(group['params']) for group in own]}; make the optimizer alike to resume"
            )
        states: dict[int, Any] = {}
        groups = []
        numbered = iter(_names(model, optimizer))
        for group, saved in zip(own, control["groups"], strict=True):
            for index in group["params"]:
                name = next(numbered)
                if name in state["optimizer"] and name not in control["stateless"]:
                    states[index] = state["optimizer"][name]
            kept = {key: group[key] for key in group if key not in saved}
            groups.append({**saved, **kept, "params": group["params"]})
        checkpoint.load_state_dict(
            self.engine,
            {
                **{key: control[key] for key in ("format", "config", "size", "window", "finished", "restores")},
                "knobs": control["knobs"],
                "collectors": control["collectors"],
                "open": None,
                "converged": {
                    "step": control["step"],
                    "model": state["model"],
                    "optimizer": {"state": states, "param_groups": groups},
                },
            },
        )

    def _control(self, step: int, state: Mapping[str, Any], stateless: list[str]) -> dict[str, Any]:
        engine = self.engine
        groups = state["param_groups"]
        return {
            "format": checkpoint.FORMAT,
            "config": checkpoint.config(engine),
            "size": engine.size,
            "window": engine.window.index,
            "finished": engine.finished,
            "restores": engine.restores,
            "step": step,
            "knobs": {knob.name: knob.state_dict() for knob in engine.knobs},
            # Tensors in there belong to the window under way, which is run again.
            "collectors": [_without_tensors(collector.state_dict()) for collector in engine.collectors],
            "sizes": [len(group["params"]) for group in groups],
            "groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
            "stateless": stateless,
        }


def _packed(control: dict[str, Any]) -> bytes:
    held = io.BytesIO()
    torch.save(control, held)
    return held.getvalue()


def _model_by_name(model: nn.Module, held: list[Tensor]) -> Named:
    """The model's state dict with the held tensors in place of its own."""
    tensors.reshard(model)
    live = [*model.parameters(), *model.buffers()]
    place = {id(tensor): number for number, tensor in enumerate(live)}
    return {
        name: _like(held[place[id(value)]], value) if id(value) in place else value
        for name, value in model.state_dict(keep_vars=True).items()
    }


def _like(held: Tensor, live: Tensor) -> Tensor:
    """The held part of a tensor, sharded as the live tensor is."""
    if not hasattr(live, "device_mesh"):
        return held
    from torch.distributed.tensor import DTensor

    part: Tensor = DTensor.from_local(
        held.to(tensors.local(live.detach()).device),
        live.device_mesh,
        live.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=live.shape,
        stride=live.stride(),
    )
    return part


def _names(model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    """The names of the optimizer's parameters, in the order of its groups."""
    tensors.reshard(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names[id(parameter)]


def _optimizer_by_name(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]
) -> tuple[dict[str, Named], list[str]]:
    """State by parameter name, complete: zeros stand in for parameters that have none yet, which are listed too."""
    found: dict[str, Named] = {}
    stateless: list[str] = []
    names = list(_names(model, optimizer))
    indices = [index for group in state["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    held = state["state"]
    sample = next(((held[i], parameters[n]) for n, i in enumerate(indices) if held.get(i)), None)
    if sample is None and not optimizer.state:
        sample = _sample(optimizer)
    for name, index, parameter in zip(names, indices, parameters, strict=True):
        if held.get(index):
            found[name] = dict(held[index])
            continue
        stateless.append(name)
        if sample is not None and parameter.requires_grad:
            entries, owner = sample
            found[name] = {key: _zeros(value, owner, parameter) for key, value in entries.items()}
    return found, stateless


def _sample(optimizer: Optimizer) -> tuple[Named, nn.Parameter] | None:
    """What state this optimizer makes for a parameter, found by an update of nothing at learning rate zero."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not parameters:
        return None
    gradients = [parameter.grad for parameter in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    before = tensors.clones([tensors.local(parameter.detach()) for parameter in parameters])
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        optimizer.step()
        owner = next((parameter for parameter in parameters if optimizer.state.get(parameter)), None)
        return None if owner is None else (dict(optimizer.state[owner]), owner)
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


def _without_tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        return None
    if isinstance(value, dict):
        return {key: _without_tensors(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_tensors(item) for item in value]
    return value
