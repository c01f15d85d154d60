"""Replicas: where the N copies live. One protocol for one process and for many."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.replicas.replica import Replica


class Replicas(ABC):
    """N replicas, of which this process hosts some.

    Attributes:
        size: N, over all processes.
        local: the replicas this process hosts, by rising index.
        hosts: this process's distinct models with their optimizers; several seats may share one.
        diverge: whether each replica has a model of its own and so can come apart from the others.
    """

    size: int
    local: Sequence[Replica]
    hosts: Sequence[tuple[nn.Module, Optimizer]]
    diverge: bool

    @abstractmethod
    def gather(self, rows: Tensor) -> NDArray[np.float64]:
        """[local, M] numbers of this process's replicas -> [N, M] of all, the same on every process.

        The only communication a window's control needs, and the only place the device is waited for.
        """

    @abstractmethod
    def share_gradients(self) -> None:
        """Give every replica the mean of all replicas' gradients."""

    @abstractmethod
    def mean(self, valid: Sequence[bool], optimizer_state: str) -> None:
        """Overwrite every replica by the mean of the valid ones, parameters and floating buffers.

        Args:
            valid: [N], which replicas take part; at least one.
            optimizer_state: "average", "keep" (each its own; a replica that failed takes a valid one's) or
                "reset".
        """

    @abstractmethod
    def combine(self, weights: NDArray[np.float64]) -> list[Tensor]:
        """sum_r weights[r] theta_r over all N replicas' parameters, in float32; weight 0 leaves one out, NaN or not."""

    @property
    def is_leader(self) -> bool:
        """Whether this process writes the history."""
        return True
