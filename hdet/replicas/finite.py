"""Whether a replica is finite: its parameters, what its optimizer holds of them, and its buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.hparams.param_groups import parameters_of
from hdet.replicas import tensors
from hdet.replicas.dense import has_arithmetic
from hdet.replicas.optimizer_states import is_of_elements
from hdet.replicas.walk import Walk

PLACES = ("parameters", "optimizer state", "buffers")
"""Where a replica can be found not to be finite, in the order of `Finiteness.flags`."""


class Finiteness:
    """Tells whether one replica is finite, without waiting for the device.

    All that a merge takes a mean of is looked at: one infinite moment or batch statistic would make NaN of everybody's.
    So are frozen parameters where replicas are merged; else one may hold an infinity by design, such as a causal mask.
    So may a buffer, if it does when the window opens; those that are not persistent, and those that came since, are
    caches that the model fills as it likes.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, merged: bool = True) -> None:
        self._model = model
        self._merged = merged
        self._walk = Walk(model)
        self._optimizer = optimizer
        self._opened: dict[str, Tensor] = {}

    def open(self) -> None:
        """A window opens."""
        self._opened = self._buffers()

    @torch.no_grad()
    def flags(self) -> Tensor:
        """[3] booleans, in the order of `PLACES`: all is finite there."""
        tensors.reshard(self._model)
        looked_at = [own for own in self._walk.parameters() if own.requires_grad or self._merged]
        parameters = tensors.all_finite(list(map(tensors.local, looked_at)))
        states = tensors.all_finite(with_mean(self._states()))
        now = self._buffers()
        kept = [now[name] | ~self._opened[name] for name in now if name in self._opened]
        buffers = torch.stack(kept).all() if kept else torch.tensor(True, device="cpu")
        return torch.stack([flag.to(parameters.device) for flag in (parameters, states, buffers)])

    def _states(self) -> Iterator[tuple[Tensor, Mapping[str, Any]]]:
        for parameter in parameters_of(self._optimizer):
            yield parameter, self._optimizer.state.get(parameter, {})

    def _buffers(self) -> dict[str, Tensor]:
        """By name, whether a persistent buffer is finite; 0-dim, on the device of the first."""
        found = dict(_persistent(self._model))
        own = list(map(tensors.as_real, found.values()))
        return dict(zip(found, tensors.finite(own), strict=True)) if found else {}


def with_mean(states: Iterable[tuple[Tensor | None, Mapping[str, Any]]]) -> list[Tensor]:
    """The tensors of parameters' optimizer states that a merge takes a mean of; of sharded ones this rank's part.

    Args:
        states: each with its parameter; None for a state of no parameter.
    """
    return [
        tensors.local(value.detach() if value.requires_grad else value)
        for parameter, state in states
        for key, value in state.items()
        if isinstance(value, Tensor)
        and is_of_elements(value.dim(), key, parameter)
        and value.numel()
        and has_arithmetic(value)
    ]


def _persistent(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                own = tensors.local(buffer.detach())
                if has_arithmetic(own) and own.numel():
                    yield f"{prefix}.{name}", own
