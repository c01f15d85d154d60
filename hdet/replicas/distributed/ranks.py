"""Replicas on the ranks of a process group: the engine's protocol in collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import compress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hdet.errors import ConfigError
from hdet.replicas import optimizer_states, tensors
from hdet.replicas.anchor import Anchor
from hdet.replicas.distributed import optimizer_mean, refusals
from hdet.replicas.distributed.agreement import agree
from hdet.replicas.distributed.exchange import Exchange
from hdet.replicas.distributed.fingerprint import fingerprint
from hdet.replicas.distributed.layout import Group
from hdet.replicas.distributed.lost import translated
from hdet.replicas.distributed.overlap import Flight
from hdet.replicas.replica import Replica
from hdet.replicas.replicas import Replicas, Terms

Host = tuple[nn.Module, Optimizer]


class Ranks(Replicas):
    """The replicas of which this rank, or its group of ranks, holds one or several.

    Args:
        hosts: this rank's models, without wrappers, with their optimizers.
        trained: what the training loop calls: the wrapped model of the only host, or the hosts' own.
        exchange: the collectives, over the ranks of its layout.
        seats: 0 where each host is a replica; else the micro-batches of the only host that are.
        reduces: the wrapper that averages gradients over replicas in its backward, if there is one.
        precision: what merged parameters travel in, as differences from the last converged point.
        overlap: for how many steps a merge may travel, and the group it does so in.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        trained: Sequence[nn.Module],
        exchange: Exchange,
        seats: int,
        reduces: DistributedDataParallel | str | None,
        precision: torch.dtype | None = None,
        overlap: tuple[int, Group] | None = None,
    ) -> None:
        self.hosts = list(hosts)
        self.exchange = exchange
        self.layout = exchange.layout
        self.diverge = seats == 0
        self._each = seats or len(self.hosts)
        self._seats = seats
        self._reduces = reduces
        self._wrapped = reduces if isinstance(reduces, DistributedDataParallel) else None
        self._precision = precision
        self._narrow = Exchange(self.layout, exchange.device, exact=True) if precision is not None else None
        self._overlap = overlap
        self._flight: Flight | None = None
        self._anchor: Anchor | None = None
        self._met = False
        self._shares = True
        self._apart = True
        self.size = self.layout.places * self._each
        first = self.layout.place * self._each
        self.local = [
            Replica(
                trained[0 if seats else i],
                self.hosts[0 if seats else i][1],
                first + i,
                0 if seats else i,
                around=self._around,
            )
            for i in range(self._each)
        ]

    @property
    def is_leader(self) -> bool:
        return bool(self.layout.table[self.layout.place, self.layout.part] == 0)

    @property
    def bytes_held(self) -> int:
        """The memory of the persistent buckets."""
        return self.exchange.bytes_held + (self._narrow.bytes_held if self._narrow is not None else 0)

    def begin(self, terms: Terms) -> None:
        own = terms.gradients == "local" or terms.observed or not self.diverge
        if self._reduces == "hsdp" and own:
            why = "local gradients" if terms.gradients == "local" else "each replica's own gradient"
            raise ConfigError(
                f"fully_shard over a mesh with a replicate dimension averages gradients over replicas in its backward, "
                f"and {why} were asked for; shard over the other dimension only (fully_shard(model, "
                f"mesh=mesh['dp_shard'])) and give hdet.distribute the whole mesh: the engine then shares gradients "
                f"itself where they are to be shared"
            )
        own = own or (self.exchange.exact and self._wrapped is not None)
        if terms.observed and refusals.sharded(self.hosts[0][0]):
            raise ConfigError(
                "Contrast evidence looks at a replica's whole gradient, and this model's lies in parts on several "
                "ranks; use DistributedDataParallel or an unwrapped model, or other evidence"
            )
        if self._wrapped is not None and own and terms.gradients == "shared" and self._wrapped._comm_hooks:
            raise ConfigError(
                "a communication hook is registered on DistributedDataParallel, but here the engine shares gradients "
                "itself, after backward (micro-batches, exact=True, or evidence that looks at each replica's own "
                "gradient), and the hook would not run; leave the hook or that out"
            )
        if self._overlap is not None and terms.merge != {"kind": "mean", "optimizer": "keep"}:
            raise ConfigError(
                f"overlap= corrects parameters when their mean arrives; an optimizer's state, which has moved on, "
                f"cannot be corrected so: give merge=hdet.Mean('keep'), not {dict(terms.merge)}"
            )
        self._anchor = terms.anchor
        self._shares = own or self._reduces is None
        self.shares_on_call = self._shares and self.size > 1
        self._apart = terms.apart
        if self._wrapped is not None and self.diverge:
            # Each replica's buffers are its own until the merge, as in one process. Otherwise those of rank 0 would
            # replace them in every forward pass.
            self._wrapped.broadcast_buffers = False
        with translated("comparing declarations"):
            agree(self.exchange, terms.declaration)

    def gather(self, rows: Tensor) -> NDArray[np.float64]:
        with translated("gathering losses at a window's end"):
            table = self.exchange.gather(rows.detach().double().flatten()).cpu().numpy()
        table = table.reshape(len(table), self._each, -1)[self.layout.table]
        # [places, parts, each, M]. A replica's number is the mean over the ranks that hold it: NaN if any is.
        merged = table[:, 0] if self.layout.parts == 1 else table.mean(axis=1)
        return np.ascontiguousarray(merged.reshape(self.size, -1), dtype=np.float64)

    @torch.no_grad()
    def share_gradients(self) -> None:
        if not self._shares or self.size == 1:
            return
        owned = [tensors.trained(model) for model, _ in self.hosts]
        count = len(owned[0])
        used = [any(own[i].grad is not None for own in owned) for i in range(count)]
        gradients = [[_gradient(parameter) for parameter in own] for own in owned]
        lead = gradients[0]
        if self._seats > 1:
            torch._foreach_mul_(lead, 1.0 / self._seats)
        if len(owned) > 1:
            tensors.mean_(gradients, [lead])
        # A parameter that is used in some replicas only counts as zero in the others; where no replica uses it, it
        # keeps no gradient, so that weight decay leaves it alone. Who uses what travels along.
        votes = torch.tensor(used, dtype=torch.float32, device=self.exchange.device)
        both = [*lead, votes]
        with translated("sharing gradients"):
            self.exchange.reduce(both, both, [1.0] * self.layout.places, mean=True)
        for other in gradients[1:]:
            tensors.copy_(other, lead)
        if not all(used):
            for i, wanted in enumerate((votes > 0).tolist()):
                if not wanted:
                    for own in owned:
                        own[i].grad = None

    def mean(self, valid: Sequence[bool], optimizer_state: str) -> None:
        if not self.diverge:
            return
        with translated("merging replicas"):
            self._merge(list(valid), optimizer_state)

    def mean_buffers(self, valid: Sequence[bool]) -> None:
        if self.diverge:
            with translated("merging buffers"):
                self._merge_buffers(list(valid))

    @torch.no_grad()
    def _merge(self, valid: list[bool], optimizer_state: str) -> None:
        counts, first, sound, lead = self._parties(valid)
        others = [host for host in self.hosts if host is not lead]
        mine = self._merged(lead)
        if len(sound) > 1:
            tensors.mean_([self._merged(host) for host in sound], [mine])
        if not (all(valid) and self._alike(mine)):
            self._reduce_parameters(mine, counts)
        self._met = True
        for host in others:
            tensors.copy_(self._merged(host), mine)
        self._merge_buffers(valid)

        if optimizer_state == "average":
            if len(sound) > 1:
                optimizer_states.average([optimizer for _, optimizer in sound], [lead[1]])
            optimizer_mean.average(self.exchange, lead[1], counts)
            if others:
                optimizer_states.average([lead[1]], [optimizer for _, optimizer in others])
        elif optimizer_state == "reset":
            for _, optimizer in self.hosts:
                optimizer.state.clear()
        elif not all(valid):
            ordered = [lead, *others]
            failed = [host not in sound for host in ordered]
            optimizer_mean.take_over(self.exchange, [optimizer for _, optimizer in ordered], failed, first)

    def _reduce_parameters(self, mine: Sequence[Tensor], counts: Sequence[float]) -> None:
        if self._overlap is not None and all(counts):
            self._flight = Flight(mine, self.layout, self._overlap[1]())
        elif self._narrow is not None and self._met:
            # From the first merge on the last converged point is the same everywhere, and differences are small.
            start = [held.to(own.device) for held, own in zip(self._anchored(), mine, strict=True)]
            moved = [(own.float() - held.float()).to(self._precision) for own, held in zip(mine, start, strict=True)]
            self._narrow.reduce(moved, moved, counts, mean=True)
            tensors.copy_(mine, [held.float() + step.float() for held, step in zip(start, moved, strict=True)])
        else:
            self.exchange.reduce(mine, mine, counts, mean=True)

    def _anchored(self) -> list[Tensor]:
        """The anchor's values of the parameters that are merged."""
        assert self._anchor is not None
        model, optimizer = self.hosts[0]
        held = self._anchor.parameters()
        chosen = _movable(model, optimizer)
        return list(compress(held, chosen))

    @property
    def in_flight(self) -> bool:
        return self._flight is not None

    def advance(self, *, now: bool = False) -> None:
        if self._flight is None or self._overlap is None:
            return
        self._flight.steps += not now
        if now or self._flight.steps >= self._overlap[0]:
            self.settle()
            self._flight.land()
            self._flight = None

    def settle(self) -> None:
        if self._flight is not None:
            with translated("waiting for a merge"):
                tensors.copy_(self._anchored(), self._flight.merged())

    @torch.no_grad()
    def _merge_buffers(self, valid: list[bool]) -> None:
        counts, first, sound, lead = self._parties(valid)
        mine = _buffers(lead)
        if not mine:
            return
        # One replica decides which buffers have a mean: a failed one's may hold anything.
        decided = torch.tensor(tensors.with_mean(lead[0]), dtype=torch.uint8, device=self.exchange.device)
        self.exchange.broadcast([decided], first)
        averaged = decided.bool().tolist()
        others = [not yes for yes in averaged]
        real = list(compress(mine, averaged))
        if len(sound) > 1:
            tensors.mean_([list(compress(_buffers(host), averaged)) for host in sound], [real])
        self.exchange.reduce(real, real, counts, mean=True)
        self.exchange.broadcast(list(compress(mine, others)), first)
        for host in self.hosts:
            if host is not lead:
                tensors.copy_(_buffers(host), mine)

    def _parties(self, valid: list[bool]) -> tuple[list[float], int, list[Host], Host]:
        """Valid replicas by place, the first place that has one, this rank's valid hosts, and the first of them."""
        each, place = self._each, self.layout.place
        counts = [float(sum(valid[i * each : (i + 1) * each])) for i in range(self.layout.places)]
        first = next(i for i, count in enumerate(counts) if count)
        sound = list(compress(self.hosts, valid[place * each : (place + 1) * each]))
        return counts, first, sound, sound[0] if sound else self.hosts[0]

    def _merged(self, host: Host) -> list[Tensor]:
        """The parameters that can come apart."""
        return list(compress(tensors.parameters(host[0]), _movable(*host)))

    def _alike(self, own: Sequence[Tensor]) -> bool:
        """Whether all replicas hold the same bits, where nothing was to set them apart: they are then left alone."""
        if self._apart:
            return False
        marks = self.exchange.gather(fingerprint(own, self.exchange.device)).cpu()[
            self.layout.table[:, self.layout.part]
        ]
        return bool((marks == marks[0]).all())

    @torch.no_grad()
    def combine(self, weights: NDArray[np.float64]) -> list[Tensor]:
        own = weights[self.layout.place * self._each :][: len(self.hosts)].tolist()
        if not self.diverge:
            return tensors.parameters(self.hosts[0][0])
        by_place = weights.reshape(self.layout.places, self._each)
        if self._each == 1:
            sources = [t.float() for t in tensors.parameters(self.hosts[0][0])]
            scales = by_place[:, 0].tolist()
        else:
            scales = [float((row != 0.0).any()) for row in by_place]
            sources = []
            for (model, _), weight in zip(self.hosts, own, strict=True):
                if weight != 0.0:
                    part = torch._foreach_mul([t.float() for t in tensors.parameters(model)], weight)
                    sources = list(torch._foreach_add(sources, part)) if sources else list(part)
            if not sources:
                sources = [torch.zeros_like(t, dtype=torch.float32) for t in tensors.parameters(self.hosts[0][0])]
        targets = [torch.empty_like(t) for t in sources]
        with translated("combining replicas"):
            self.exchange.reduce(sources, targets, scales, mean=False)
        return targets

    @contextmanager
    def _around(self) -> Iterator[None]:
        """Around a forward and backward: without data parallelism's own averaging where it is not wanted."""
        quiet = self._wrapped is not None and self._shares
        with translated("in forward or backward"), self._wrapped.no_sync() if quiet else nullcontext():  # type: ignore[union-attr]
            yield


def _movable(model: nn.Module, optimizer: Optimizer) -> list[bool]:
    """Which of `tensors.parameters(model)` can come apart: trained ones, and frozen ones the optimizer holds."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    tensors.reshard(model)
    return [p.requires_grad or id(p) in held for p in model.parameters() if p.numel()]


def _buffers(host: Host) -> list[Tensor]:
    return [tensors.local(buffer) for buffer in host[0].buffers()]


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return tensors.local(parameter.grad)
