"""Whether replicas that are to share gradients do: seen from the gradients themselves."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.errors import StepError
from hdet.replicas import Replicas, tensors

LOOKS = 2
"""Steps that are looked at. In the first all replicas are alike, and on the same data their gradients would be too."""


class Sharing:
    """Compares the replicas' gradients as their optimizers meet them, in the first steps of a run.

    A loop of the user's own may share them in many ways (DistributedDataParallel, `share_gradients`, an all-reduce),
    and not all can be seen from here. Their outcome can: the same gradient, bit for bit, at every replica.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._looks = LOOKS
        self._seen: list[list[float]] = [[] for _ in replicas.hosts]
        self._hooks = [
            optimizer.register_step_pre_hook(partial(self._look, host))
            for host, (_, optimizer) in enumerate(replicas.hosts)
        ]

    @property
    def open(self) -> bool:
        """Whether there is still something to look at."""
        return self._looks > 0

    def check(self, step: int) -> None:
        """After the optimizers' steps, in every process.

        Raises:
            StepError: the replicas' gradients differ.
        """
        rows = [[float(bool(seen)), *(seen or (0.0, 0.0))] for seen in self._seen]
        table = self._replicas.gather(torch.tensor([rows[r.host] for r in self._replicas.local], dtype=torch.float64))
        self._seen = [[] for _ in rows]
        if not table[:, 0].all():
            return  # an optimizer's step was left out, as by a GradScaler
        if not np.array_equal(table, np.broadcast_to(table[0], table.shape), equal_nan=True):
            raise StepError(
                f"the gradients of the {len(table)} replicas differ in step {step}, so each trains on its own (local "
                f"SGD), and gradients='shared' was declared: wrap the model in DistributedDataParallel, or call "
                f"scheduler.engine.share_gradients() after the last backward of a step; or declare gradients='local'"
            )
        self._looks -= 1
        if not self.open:
            self.close()

    def close(self) -> None:
        """Look no more."""
        self._looks = 0
        for hook in self._hooks:
            hook.remove()

    def _look(self, host: int, optimizer: Optimizer, *_: Any) -> None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        self._seen[host] = extremes(p.grad for p in parameters if p.grad is not None)


@torch.no_grad()
def extremes(values: Iterable[Tensor]) -> list[float]:
    """The smallest and the largest number in dense tensors (of sharded ones this rank's part); none without any.

    Unlike a sum they do not depend on the order of the arithmetic, so equal tensors have equal ones everywhere.
    """
    dense = [tensors.local(value).detach() for value in values if value.layout == torch.strided]
    real = [torch.view_as_real(value) if value.is_complex() else value for value in dense if value.numel()]
    if not real:
        return []
    pairs = [torch.stack(torch.aminmax(value)).double().to(real[0].device) for value in real]
    table = torch.stack(pairs)
    return [float(table[:, 0].min()), float(table[:, 1].max())]
