"""The parameters that training can change, looked up once a window."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

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
        self.open()

    def open(self) -> None:
        """A window opens: look them up."""
        whole = [
            [(parameter, moves) for parameter, moves in tensors.can_move(walk, optimizer) if parameter.numel()]
            for walk, (_, optimizer) in zip(self._walks, self._hosts, strict=True)
        ]
        self.flags = [moves for _, moves in whole[0]]
        self.parameters = [[parameter for parameter, moves in own if moves] for own in whole]
        self._sharded = [[hasattr(p, "to_local") for p in own] for own in self.parameters]
        self._values: list[list[Tensor]] = [[] for _ in self._hosts]
        self._memory: list[list[int]] = [[] for _ in self._hosts]

    @torch.no_grad()
    def values(self, host: int = 0) -> list[Tensor]:
        """Their values now, detached and sharing memory; of sharded ones this rank's part.

        The same list is given again for as long as the parameters keep their memory.
        """
        own: Sequence[Tensor] = self.parameters[host]
        if any(self._sharded[host]):
            # `to_local` makes a tensor anew for autograd, which of hundreds takes longer than the rest of a step.
            held = [
                getattr(p, "_local_tensor", None) if cut else p for p, cut in zip(own, self._sharded[host], strict=True)
            ]
            own = [tensors.local(p) if part is None else part for p, part in zip(own, held, strict=True)]
        memory = [tensor.data_ptr() for tensor in own]
        if memory != self._memory[host] or not self._values[host]:
            self._memory[host] = memory
            self._values[host] = [tensor.detach() for tensor in own]
        return self._values[host]

    def of(self, every: Sequence[Tensor]) -> list[Tensor]:
        """Those of tensors in the order of `hdet.replicas.tensors.parameters` that stand for such a parameter."""
        return list(compress(every, self.flags))
