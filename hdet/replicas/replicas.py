"""Replicas: where the N copies live. One protocol for one process and for many."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from hdet.errors import ConfigError
from hdet.replicas.anchor import Anchor
from hdet.replicas.replica import Replica


@dataclass(frozen=True)
class Terms:
    """What an engine asks of its replicas.

    Attributes:
        gradients: "shared" or "local".
        explored: whether any knob is explored, in whatever way.
        apart: whether replicas are expected to come apart in a window.
        observed: whether evidence looks at each replica's own gradient before it is shared.
        anchor: the last converged point, the same in all processes from the first merge on.
        merge: how the replicas become one.
        declaration: by name, what has to be the same in all processes.
    """

    gradients: str
    explored: bool
    apart: bool
    observed: bool
    anchor: Anchor
    merge: Mapping[str, Any]
    declaration: Mapping[str, str]


def present(table: NDArray[np.float64]) -> NDArray[np.bool_]:
    """[N] which replicas of a gathered [N, M] table are there; of the others nothing was gathered."""
    missing = np.isnan(table[:, 0])
    if missing.any():
        missing &= np.isnan(table).all(axis=1)
    return np.logical_not(missing)


class Replicas(ABC):
    """N replicas, of which this process hosts some.

    Attributes:
        size: N, over all processes.
        local: the replicas this process hosts, by rising index.
        hosts: this process's distinct models with their optimizers; several seats may share one.
        diverge: whether each replica has a model of its own and so can come apart from the others.
        shares_on_call: whether gradients are alike only once `share_gradients` was called; else an engine leaves that
            out. True where nothing is said.
        left_to_loop: whether the training loop shares gradients and buffers itself.
        scaler: the GradScaler by which the loop multiplies its losses, if one is known of; its scale alone, of a
            checkpoint, until it makes a step.
    """

    size: int
    local: Sequence[Replica]
    hosts: Sequence[tuple[nn.Module, Optimizer]]
    diverge: bool
    shares_on_call: bool = True
    left_to_loop: bool = False
    scaler: GradScaler | float | None = None

    def leave_to_loop(self) -> None:
        """Before `begin`: the training loop goes on sharing gradients and buffers itself, as it did without hdet.

        Nothing is done here in its place, and nothing that it set up (DistributedDataParallel's buffers, `no_sync`) is
        changed.

        Raises:
            ConfigError: these replicas have models of their own, which only a loop written for them trains.
        """
        if self.diverge and self.size > 1:
            raise ConfigError(
                "replicas with models of their own need a loop that trains each of them: write it for hdet.Engine "
                "(docs/quickstart.md), or give hdet.micro_batches or hdet.distribute(..., micro_batches=...)"
            )
        self.left_to_loop = True

    def begin(self, terms: Terms) -> None:  # noqa: B027
        """Called once by the engine, before anything else, with what it was declared to do.

        Raises:
            ConfigError: these replicas cannot do it, or other processes were told otherwise.
        """

    @property
    def first_of_hosts(self) -> list[Replica]:
        """The first replica of each model that this process holds; seats at one model share all there is of it."""
        first: dict[int, Replica] = {}
        for replica in self.local:
            first.setdefault(replica.host, replica)
        return [first[host] for host in range(len(self.hosts))]

    @property
    def needs_passes(self) -> str | None:
        """Why passes have to run inside `with replica:`; `None` where they need not."""
        return None

    @property
    def in_flight(self) -> bool:
        """Whether a merge has begun that the models do not show yet."""
        return False

    @property
    def overlaps(self) -> bool:
        """Whether merges travel while training goes on."""
        return False

    def on_arrival(self, change: Callable[[list[Tensor]], list[Tensor]]) -> None:
        """Let the merge in flight come to `change` of the mean.

        Args:
            change: from the mean, [P] tensors in float32 at least, to what the parameters become. It comes to the same
                in all processes. It is called once, when the result is first needed, and so may step an optimizer;
                never where the merge is forgotten before (`restored`).
        """
        raise NotImplementedError

    def advance(self, *, now: bool = False) -> None:  # noqa: B027
        """A step was made: apply a merge in flight if it is its time, or if it has to be `now`."""

    def settle(self) -> None:  # noqa: B027
        """Let the anchor hold the merged point, though a merge in flight may not have reached the models."""

    def restored(self, *, merged: bool) -> None:  # noqa: B027
        """Models are about to be put back to an earlier point: forget a merge in flight, which is of another.

        Args:
            merged: whether that point is the same in all processes, as from the first merge on.
        """

    @abstractmethod
    def gather(self, rows: Tensor) -> NDArray[np.float64]:
        """[local, M] numbers of this process's replicas -> [N, M] of all, the same on every process.

        Of a replica that is not there (`hdet.torchft`) the row is NaN: see `present`.

        The only communication a window's control needs, and the only place the device is waited for.
        """

    @property
    def hands_over(self) -> bool:
        """Whether `.grad` will not show a replica's own gradient, not shared, after its pass."""
        return False

    def observe(  # noqa: B027
        self, parameters: Sequence[nn.Parameter], take: Callable[[Sequence[int], Sequence[Tensor]], None]
    ) -> None:
        """Said, where this `hands_over`, when a replica is entered whose own gradient is asked for of its pass.

        Args:
            take: is given places among `parameters`, and gradients of these, while backward goes on.
        """

    def observe_no_more(self) -> None:  # noqa: B027
        """Said when passes are not going to be observed for a while."""

    @abstractmethod
    def share_gradients(self) -> None:
        """Give every replica the mean of all replicas' gradients."""

    @abstractmethod
    def mean(self, valid: Sequence[bool], optimizer_state: str, weights: NDArray[np.float64] | None = None) -> None:
        """Overwrite every replica by the mean of the valid ones, parameters and buffers that have a mean.

        Args:
            valid: [N], which replicas take part; at least one.
            optimizer_state: "average", "keep" (each its own; a replica that failed takes a valid one's) or
                "reset".
            weights: [N] of any sum, for a weighted mean; 0 where a replica is not valid. Or [N, P], a column for each
                of the P parameters that training can change: buffers and optimizer state then take the columns' mean.
        """

    @abstractmethod
    def copy(self, sources: Sequence[int]) -> None:
        """Overwrite replica r by replica sources[r]: parameters, buffers, optimizer state. Who is its own source stays.

        All are taken as they were. Nothing else travels than what is copied, but that the ranks of a sharded replica
        agree on its buffers.
        """

    def take_first_state(self) -> None:  # noqa: B027
        """Give every replica the optimizer state of the first; those of one process have one already.

        Called where every process has put its own replicas back to one point.
        """

    def take_firsts(self, tensors: Sequence[Tensor]) -> None:  # noqa: B027
        """Overwrite tensors, in every process, by those that the process of the first replica has. A collective."""

    @abstractmethod
    def mean_buffers(self, valid: Sequence[bool]) -> None:
        """The part of `mean` that concerns buffers; calling it twice does no more than once."""

    @contextmanager
    def lent_buffers(self, valid: Sequence[bool]) -> Iterator[None]:
        """Inside the block all models have the mean of the buffers, where the training loop shares buffers itself.

        Points that different ranks evaluate would differ by the ranks' batch statistics, too.
        """
        yield

    def unscaled(self, gradient: Tensor) -> Tensor:
        """What a pass's gradient, or a part of it, is without a GradScaler's factor."""
        if isinstance(self.scaler, float):
            return gradient / self.scaler
        scale = None if self.scaler is None else self.scaler._get_scale_async()
        return gradient if scale is None else gradient / scale.to(gradient.device)

    @abstractmethod
    def combine(self, weights: NDArray[np.float64], which: Sequence[bool] | None = None) -> list[Tensor]:
        """sum_r weights[r] theta_r over all N replicas' parameters, in float32 at least.

        Args:
            weights: [N]; 0 leaves a replica out, NaN or not.
            which: of `tensors.parameters` take part, on every process; all by default.
        """

    @property
    def is_leader(self) -> bool:
        """Whether this process writes the history."""
        return True
