"""The parameters that training can change, looked up once a window."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.replicas import tensors
from hdet.replicas.schedule_free import is_schedule_free
from hdet.replicas.walk import Walk


class Moving:
    """The parameters of each of one model's copies that training can change, as they were when a window opened.

    Whatever is held of weights is held of these alone: of a model that is frozen but for its LoRA adapters, of the
    adapters. A parameter thawed within a window counts from the next one on.

    Args:
        hosts: copies of one model with their optimizers.

    Attributes:
        evaluates_average: whether the optimizer averages the weights itself (`hdet.replicas.schedule_free`).
        flags: which of `hdet.replicas.tensors.parameters` they are, the same in all copies.
        parameters: for each host, in the model's order.
    """

    def __init__(self, hosts: Sequence[tuple[nn.Module, Optimizer]]) -> None:
        self._hosts = hosts
        self._walks = [Walk(model) for model, _ in hosts]
        self.evaluates_average = is_schedule_free(hosts[0][1])
        self.parameters: list[list[nn.Parameter]] = [[] for _ in hosts]
        self._values: list[list[Tensor]] = [[] for _ in hosts]
        self._memory: list[list[int]] = [[] for _ in hosts]
        self.open()

    def open(self) -> None:
        """A window opens: look them up."""
        before = self.parameters
        whole = [
            [(parameter, moves) for parameter, moves in tensors.can_move(walk, optimizer) if parameter.numel()]
            for walk, (_, optimizer) in zip(self._walks, self._hosts, strict=True)
        ]
        self.flags = [moves for _, moves in whole[0]]
        self.parameters = [[parameter for parameter, moves in own if moves] for own in whole]
        self._sharded = [[hasattr(p, "to_local") for p in own] for own in self.parameters]
        for host, (were, are) in enumerate(zip(before, self.parameters, strict=True)):
            # One may have been given data of another shape in the memory that it had.
            if list(map(id, were)) != list(map(id, are)) or _layout(self._values[host]) != _layout(self._here(host)):
                self._values[host] = []

    def flagged(self, flags: Sequence[bool]) -> list[nn.Parameter]:
        """The first model's parameters that moved when the flags were these."""
        every = [parameter for parameter in self._walks[0].every() if parameter.numel()]
        return [parameter for parameter, moved in zip(every, flags, strict=True) if moved]

    def values(self, host: int = 0) -> list[Tensor]:
        """Their values now, detached and sharing memory; of sharded ones this rank's part.

        The same list is given again for as long as the parameters keep their memory.
        """
        own = self._here(host)
        memory = list(map(Tensor.data_ptr, own))
        if memory != self._memory[host] or not self._values[host]:
            self._memory[host] = memory
            self._values[host] = [tensor.detach() for tensor in own]
        return self._values[host]

    def _here(self, host: int) -> Sequence[Tensor]:
        """This rank's part of each parameter of a model."""
        own: Sequence[Tensor] = self.parameters[host]
        if any(self._sharded[host]):
            # `to_local` makes a tensor anew for autograd, which of hundreds takes longer than the rest of a step.
            held = [
                getattr(p, "_local_tensor", None) if cut else p for p, cut in zip(own, self._sharded[host], strict=True)
            ]
            own = [tensors.local(p) if part is None else part for p, part in zip(own, held, strict=True)]
        return own


def _layout(of: Sequence[Tensor]) -> list[tuple[torch.dtype, torch.Size, tuple[int, ...]]]:
    return [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in of]
