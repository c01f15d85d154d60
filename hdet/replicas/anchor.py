"""The anchor: the last converged point, to measure a window's update from and to fall back on."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.replicas import tensors


class Anchor:
    """A copy of one model's parameters, buffers and optimizer state at a window's opening.

    Args:
        model, optimizer: the pair it is taken from.
        device: where the copy lies; `None` beside the original, "cpu" to spare device memory.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: str | None = None) -> None:
        self._model = model
        self._optimizer = optimizer
        self._device = device
        self._held: list[Tensor] = []
        self._optimizer_state: dict[str, Any] = {}
        self.step = 0

    @torch.no_grad()
    def take(self, step: int) -> None:
        """Copy the point as it is now; `step` is the number of updates it has had."""
        self.step = step
        live = _everything(self._model)
        if len(self._held) == len(live):
            tensors.copy_(self._held, live)
        else:
            self._held = tensors.clones(live, self._device)
        self._optimizer_state = self._kept(self._optimizer.state_dict())

    def _kept(self, state: dict[str, Any]) -> dict[str, Any]:
        return {
            key: _copied(value, self._device) if key == "state" else copy.deepcopy(value)
            for key, value in state.items()
        }

    def parameters(self) -> list[Tensor]:
        """The anchored values of `hdet.replicas.tensors.parameters(model)`, in its order."""
        tensors.reshard(self._model)
        whole = [parameter.numel() for parameter in self._model.parameters()]
        return [held for held, size in zip(self._held[: len(whole)], whole, strict=True) if size]

    @property
    def held(self) -> list[Tensor]:
        """The anchored values of all parameters and buffers, in the model's order; of sharded ones this rank's part."""
        return self._held

    @property
    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state dict as it was."""
        return self._optimizer_state

    def restore(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Put the point back into a model and its optimizer."""
        tensors.copy_(_everything(model), self._held)
        optimizer.load_state_dict(copy.deepcopy(self._optimizer_state))

    def substituted(self) -> AbstractContextManager[None]:
        """The anchored parameters and buffers in place of the model's, inside a block."""
        return tensors.substituted(_everything(self._model), self._held)

    def state_dict(self) -> dict[str, Any]:
        """The point as a model's and an optimizer's state dict."""
        with self.substituted():
            model = copy.deepcopy(self._model.state_dict())
        return {"step": self.step, "model": model, "optimizer": copy.deepcopy(self._optimizer_state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold the point of a `state_dict`. Buffers that it does not name (not persistent) are held as they are now."""
        self.take(state["step"])
        with self.substituted():
            self._model.load_state_dict(state["model"])
            tensors.copy_(self._held, _everything(self._model))
        self._optimizer_state = self._kept(state["optimizer"])


def _copied(value: Any, device: str | None) -> Any:
    """A copy of nested state; tensors go to `device`, from which `Optimizer.load_state_dict` fetches them back."""
    if isinstance(value, Tensor):
        return value.detach().to(device=device, copy=True)
    if isinstance(value, dict):
        return {key: _copied(item, device) for key, item in value.items()}
    return copy.deepcopy(value)


def _everything(model: nn.Module) -> list[Tensor]:
    tensors.reshard(model)
    return [tensors.local(t.detach()) for t in (*model.parameters(), *model.buffers())]
