"""Replicas on the ranks of a process group: the engine's protocol in collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import compress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hdet.errors import ConfigError, StepError
from hdet.replicas import copies, tensors, weighting
from hdet.replicas.anchor import Anchor
from hdet.replicas.dense import can_be_written
from hdet.replicas.distributed import buffer_mean, fully_sharded, optimizer_mean, refusals
from hdet.replicas.distributed.agreement import agree
from hdet.replicas.distributed.exchange import Exchange
from hdet.replicas.distributed.fingerprint import fingerprint
from hdet.replicas.distributed.half_precision import mean_narrow_
from hdet.replicas.distributed.layout import Group, of_group
from hdet.replicas.distributed.lost_rank import translate, translated
from hdet.replicas.distributed.overlap import Flight
from hdet.replicas.distributed.own_gradient import OwnGradient, Take
from hdet.replicas.in_process import transplant
from hdet.replicas.replica import Replica
from hdet.replicas.replicas import Replicas, Terms
from hdet.replicas.shared_parameters import SharedParameters, not_in_all
from hdet.replicas.walk import Walk

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
        self._walks = [Walk(model) for model, _ in self.hosts]
        self._shared = SharedParameters([model for model, _ in self.hosts])
        self.exchange = exchange
        self.layout = exchange.layout
        self.diverge = seats == 0
        self._each = seats or len(self.hosts)
        self._seats = seats
        self._reduces = reduces
        self._wrapped = reduces if isinstance(reduces, DistributedDataParallel) else None
        self._quiet: Callable[[], AbstractContextManager[None]] | None = None
        if self._wrapped is not None:
            self._quiet = self._wrapped.no_sync
        self._precision = precision
        self._narrow = Exchange(self.layout, exchange.device, exact=True) if precision is not None else None
        self._overlap = overlap
        self._flight: Flight | None = None
        self._anchor: Anchor | None = None
        self._met = False
        self._plain = False
        self._pooled: Exchange | None = None  # over all ranks, where each has batch statistics of its own
        self._within: Exchange | None = None  # over those of this replica, made for the first copy
        if fully_sharded.over(self.hosts[0][0], self.layout.parts):
            self._pooled = Exchange(of_group(self.layout.everyone()), exchange.device, exchange.exact)
        self._buffers = True  # whether any rank had some, when all last gathered numbers
        self._shares = True
        self._apart = True
        self._own: OwnGradient | None = None
        self._observed: tuple[Sequence[nn.Parameter], Take] | None = None  # of the pass that begins
        self._trained: list[bool] = []  # which parameters were, when replicas last agreed
        self._cast: list[list[bool]] = []  # which are trained, and which have a gradient here
        self._votes = torch.empty(0)  # the same, on the device
        self._summed: bool | None = None  # whether DDP averaged after the last pass of this step
        # A static graph is recorded in a first backward that averages. (What was averaged is not changed by the next.)
        self._begun = self._wrapped is None or not self._wrapped.static_graph
        self.size = self.layout.places * self._each
        first = self.layout.place * self._each
        self.local = [
            Replica(
                trained[0 if seats else i],
                self.hosts[0 if seats else i][1],
                first + i,
                0 if seats else i,
                on_error=partial(translate, doing="in forward or backward"),
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

    def leave_to_loop(self) -> None:
        super().leave_to_loop()
        self._quiet = None

    def begin(self, terms: Terms) -> None:
        # DDP can be observed while it averages, and leaves gradients to accumulate until the last micro-batch.
        beside = self._wrapped is None and (terms.observed or not self.diverge) and not self.left_to_loop
        own = terms.gradients == "local" or beside or (self.exchange.exact and self._reduces is not None)
        if self._reduces == "hsdp" and own:
            self._quiet = fully_sharded.without_all_reduce(self.hosts[0][0])
        if self._reduces == "hsdp" and own and self._quiet is None:
            why = "local gradients" if terms.gradients == "local" else "each replica's own gradient"
            raise ConfigError(
                f"fully_shard over a mesh with a replicate dimension averages gradients over replicas in its backward, "
                f"and {why} were asked for; shard over the other dimension only (fully_shard(model, "
                f"mesh=mesh['dp_shard'])) and give hdet.distribute the whole mesh: the engine then shares gradients "
                f"itself where they are to be shared"
            )
        if terms.observed and refusals.sharded(self.hosts[0][0]):
            raise ConfigError(
                "Contrast evidence looks at a replica's whole gradient, and this model's lies in parts on several "
                "ranks; give the knob evidence=hdet.evidence.MixedDifference() and the engine "
                "objective=hdet.Objective(...), or use DistributedDataParallel or an unwrapped model"
            )
        if self._wrapped is not None and own and terms.gradients == "shared" and self._wrapped._comm_hooks:
            raise ConfigError(
                "a communication hook is registered on DistributedDataParallel, but with exact=True the engine shares "
                "gradients itself, after backward and in the order of the replicas, and the hook would not run; leave "
                "the hook or exact=True out"
            )
        if self._wrapped is not None and own and self._wrapped.static_graph:
            raise ConfigError(
                "DistributedDataParallel(static_graph=True) has to average gradients in its first backward, and with "
                "exact=True or local gradients it never does; leave static_graph=True or that out"
            )
        if self._overlap is not None and not _leaves_states(terms.merge):
            raise ConfigError(
                f"overlap= corrects parameters when their mean arrives; an optimizer's state, which has moved on, "
                f"cannot be corrected so: give merge=hdet.merges.Mean('keep'), or hdet.merges.Outer(), not "
                f"{dict(terms.merge)}"
            )
        self._anchor = terms.anchor
        self._shares = (own or self._reduces is None) and not self.left_to_loop
        self.shares_on_call = (self._shares or self._seats > 1) and self.size > 1 and not self.left_to_loop
        self._own = OwnGradient() if terms.observed and not self._shares else None
        self._apart = terms.apart
        counts_passes = self._seats > 1 and not self.left_to_loop
        if counts_passes or (self._quiet is not None and self._shares) or self._own is not None:
            for number, replica in enumerate(self.local):
                replica.around = partial(self._around, number)
        if self._wrapped is not None and not self.left_to_loop:
            # With nothing to explore this is data parallelism as it is, rank 0's buffers included. Else each rank's are
            # its own until the window's end: rank 0's, knobs among them, do not replace them in every forward pass.
            plain = self.diverge and not terms.explored and not self._shares
            self._plain = self._wrapped.broadcast_buffers and plain
            self._wrapped.broadcast_buffers = self._plain
        with translated("comparing declarations"):
            agree(self.exchange, terms.declaration)

    def gather(self, rows: Tensor) -> NDArray[np.float64]:
        # Whether a rank has buffers goes along, so that merges of models without ask for none.
        buffers = any(next(model.buffers(), None) is not None for model, _ in self.hosts)
        row = rows.detach().double().flatten()
        with translated("gathering losses at a window's end"):
            table = self.exchange.gather(torch.cat([row, row.new_full((1,), float(buffers))])).cpu().numpy()
        self._buffers = bool((table[:, -1] == 1.0).any())  # of a group that is gone it is NaN
        table = table[:, :-1].reshape(len(table), self._each, -1)[self.layout.table]
        # [places, parts, each, M]. A replica's number is the mean over the ranks that hold it: NaN if any is.
        merged = table[:, 0] if self.layout.parts == 1 else table.mean(axis=1)
        return np.ascontiguousarray(merged.reshape(self.size, -1), dtype=np.float64)

    @property
    def hands_over(self) -> bool:
        return self._own is not None

    def observe(self, parameters: Sequence[nn.Parameter], take: Take) -> None:
        self._observed = (parameters, take)

    def observe_no_more(self) -> None:
        if self._own is not None:
            self._own.release()

    def share_gradients(self) -> None:
        if self.left_to_loop:
            return
        if not self._shares:
            self._divide()
        elif self.size > 1:
            self._share()

    @torch.no_grad()
    def _share(self) -> None:
        trained, owned = self._shared.trained()
        mine = [any(own[i].grad is not None for own in owned) for i in range(len(owned[0]))]
        with translated("sharing gradients"):
            used = self._used_anywhere(trained, mine)
            gradients = [[tensors.gradient(parameter) for parameter in own] for own in owned]
            if self._seats > 1:
                torch._foreach_mul_(gradients[0], 1.0 / self._seats)
            self.exchange.mean_(gradients, [True] * (self.layout.places * len(gradients)))
        # A parameter that is used in some replicas only counts as zero in the others; where no replica uses it, it
        # keeps no gradient, so that weight decay leaves it alone.
        for i, wanted in enumerate(used):
            if not wanted:
                for own in owned:
                    own[i].grad = None

    def _used_anywhere(self, trained: list[bool], mine: list[bool]) -> list[bool]:
        """Which trained parameters have a gradient in any replica, by which are trained and have one in this process.

        What is trained travels along, for all parameters and so the same length on every rank: tensors that are not
        of the same parameters never meet. On an accelerator the answer is waited for where something is not used here,
        or where other parameters are trained than before.

        Raises:
            StepError: a parameter is trained in some replicas and not in others.
        """
        places = iter(mine)
        cast = [trained, [own and next(places) for own in trained]]
        if cast != self._cast:
            # A list that travels to an accelerator is waited for; mostly it is that of the step before.
            self._cast, self._votes = cast, torch.tensor(cast, dtype=torch.float32).to(self.exchange.device)
        members = [[self._votes.clone()] for _ in self.hosts]
        self.exchange.mean_(members, [True] * (self.layout.places * len(members)))
        if self.exchange.device.type != "cpu" and all(mine) and trained == self._trained:
            return mine
        self._trained = trained
        shares, uses = members[0][0].tolist()
        differing = [abs(share - round(share)) > 0.25 / self.size for share in shares]
        if any(differing):
            raise not_in_all(self.hosts[0][0], differing)
        return [use > 0.0 for use in compress(uses, trained)]

    def _divide(self) -> None:
        """DDP has averaged the sum of each rank's micro-batches: make it their mean."""
        if self._seats > 1 and self._summed is not None:
            if not self._summed:
                raise StepError(
                    f"DistributedDataParallel averages gradients over ranks in the backward of the last of "
                    f"{self._seats} micro-batches, and another came after it or it did not come; run "
                    f"engine.replicas in their order, or give hdet.distribute the model without "
                    f"DistributedDataParallel"
                )
            # This rank's parts: an operator on hundreds of DTensors takes longer than all else of a step.
            _, (own,) = self._shared.trained()
            gradients = [tensors.local(gradient) for gradient in (p.grad for p in own) if gradient is not None]
            with torch.no_grad():
                torch._foreach_mul_(gradients, 1.0 / self._seats)
        self._summed = None

    def mean(self, valid: Sequence[bool], optimizer_state: str, weights: NDArray[np.float64] | None = None) -> None:
        if not self.diverge:
            return
        with translated("merging replicas"):
            self._merge(list(valid), optimizer_state, weights)

    def copy(self, sources: Sequence[int]) -> None:
        if not self.diverge:
            return
        with translated("copying replicas"):
            if self._pooled is not None:
                self._pool_within()
            for target, source in copies.ordered(sources):
                (to, into), (of, out) = divmod(target, self._each), divmod(source, self._each)
                if to == of == self.layout.place:
                    transplant(self.hosts[out], self.hosts[into])
                elif of == self.layout.place:
                    optimizer_mean.send(self.exchange, self.hosts[out], to)
                elif to == self.layout.place:
                    optimizer_mean.receive(self.exchange, self.hosts[into], of)

    def take_first_state(self) -> None:
        if self.diverge:
            first = self.exchange.present.index(True) * self._each
            with translated("sending the first replica's optimizer state"):
                optimizers = [optimizer for _, optimizer in self.hosts]
                optimizer_mean.take_over(self.exchange, optimizers, [number == first for number in range(self.size)])

    def take_firsts(self, tensors: Sequence[Tensor]) -> None:
        with translated("sending what the first replica measured"):
            self.exchange.broadcast(tensors, self.exchange.present.index(True))

    def _pool_within(self) -> None:
        """Give the ranks of this replica the mean of their buffers; no merge gives them that of all."""
        if self._within is None:
            own = of_group(self.layout.group_of_place())
            self._within = Exchange(own, self.exchange.device, self.exchange.exact)
        models = [model for model, _ in self.hosts]
        buffer_mean.average(self._within, models, [1.0] * self.layout.parts, take_first=False)

    def mean_buffers(self, valid: Sequence[bool]) -> None:
        if (self.size > 1 or self._pooled is not None) and not self.left_to_loop:
            with translated("merging buffers"):
                self._merge_buffers(weighting.shares(valid, None))

    @contextmanager
    def lent_buffers(self, valid: Sequence[bool]) -> Iterator[None]:
        if not (self.left_to_loop and self.layout.places > 1):
            yield
            return
        buffers = (tensors.local(buffer) for buffer in self.hosts[0][0].buffers())
        live = [buffer for buffer in buffers if tensors.is_inexact(buffer) and can_be_written(buffer)]
        kept = tensors.clones(live)
        try:
            with translated("lending buffers"):
                if buffer_mean.alike(self._pooled or self.exchange, self.hosts[0][0]):
                    self._merge_buffers(weighting.shares(valid, None), only_means=True)
            yield
        finally:
            tensors.copy_(live, kept)

    @torch.no_grad()
    def _merge(self, valid: list[bool], optimizer_state: str, weights: NDArray[np.float64] | None) -> None:
        shares = weighting.shares(valid, weights)
        optimizers = [optimizer for _, optimizer in self.hosts]
        alike, states_alike = self._alike(optimizer_state) if all(valid) and not self._apart else (False, False)
        if not alike:
            members = self._moving()
            each = weights is not None and weights.ndim == 2
            for part, own in weighting.runs(weights) if weights is not None and each else [(slice(None), shares)]:
                self._merge_parameters([parameters[part] for parameters in members], own, part)
        self._met = True
        self._merge_frozen(shares)
        self._merge_buffers(shares)
        if optimizer_state == "average":
            if not states_alike:
                optimizer_mean.average(self.exchange, optimizers, shares)
        elif optimizer_state == "reset":
            for optimizer in optimizers:
                optimizer.state.clear()
        elif not all(valid):
            optimizer_mean.take_over(self.exchange, optimizers, valid)

    def _merge_parameters(self, members: Sequence[Sequence[Tensor]], shares: Sequence[float], part: slice) -> None:
        if self._overlap is not None and all(shares):
            moving = tensors.moving_parameters(*self.hosts[0], self._walks[0])
            self._flight = Flight(moving, self.layout, self._overlap[1]())
        elif self._narrow is not None and self._precision is not None and self._met:
            # From the first merge on the last converged point is the same everywhere, and differences are small.
            assert self._anchor is not None
            anchored = self._anchor.values(tensors.moving_parameters(*self.hosts[0], self._walks[0]))[part]
            start = [tensors.wide(t.to(own.device)) for t, own in zip(anchored, members[0], strict=True)]
            moved = [list(torch._foreach_sub([tensors.wide(t) for t in own], start)) for own in members]
            mean_narrow_(self._narrow, moved, shares, self._precision)
            for own, steps in zip(members, moved, strict=True):
                tensors.copy_(own, torch._foreach_add(start, steps))
        else:
            self.exchange.mean_(members, shares)

    def _merge_frozen(self, shares: Sequence[float]) -> None:
        assert self._anchor is not None
        frozen = [tensors.frozen(*host, walk) for host, walk in zip(self.hosts, self._walks, strict=True)]
        if frozen[0]:
            members = [[tensors.local(parameter.detach()) for parameter in own] for own in frozen]
            buffer_mean.average_written(self.exchange, members, self._anchor.written(frozen[0]), shares)

    @property
    def needs_passes(self) -> str | None:
        if self._quiet is None or self.size == 1 or not (self._shares or self._seats > 1):
            return None
        return "elsewhere data parallelism averages in backward the gradients that are not to be averaged then"

    @property
    def in_flight(self) -> bool:
        return self._flight is not None

    @property
    def overlaps(self) -> bool:
        return self._overlap is not None

    def on_arrival(self, change: Callable[[list[Tensor]], list[Tensor]]) -> None:
        assert self._flight is not None
        self._flight.change = change

    def restored(self, *, merged: bool) -> None:
        if self._flight is not None:
            with translated("waiting for a merge"):
                self._flight.mean()
        self._flight = None
        self._met = merged

    def advance(self, *, now: bool = False) -> None:
        if self._flight is None or self._overlap is None:
            return
        self._flight.steps += not now
        if now or self._flight.steps >= self._overlap[0]:
            self.settle()
            self._flight.land()
            self._flight = None

    def settle(self) -> None:
        if self._flight is not None and self._anchor is not None:
            with translated("waiting for a merge"):
                tensors.copy_(self._anchor.values(self._flight.parameters), self._flight.merged())

    @torch.no_grad()
    def _merge_buffers(self, shares: Sequence[float], only_means: bool = False) -> None:
        if not self._buffers:
            return
        if self._seats:  # a model all of whose micro-batches are sound
            shares = [min(shares[i : i + self._seats]) for i in range(0, self.size, self._seats)]
        exchange = self.exchange
        if self._pooled is not None:
            exchange, each = self._pooled, len(self.hosts)
            places = np.argsort(self.layout.table.flatten()) // self.layout.parts  # of the ranks in their order
            shares = [shares[place * each + i] for place in places.tolist() for i in range(each)]
        models = [model for model, _ in self.hosts]
        buffer_mean.average(exchange, models, shares, take_first=self._plain, only_means=only_means)

    def _moving(self) -> list[list[Tensor]]:
        """The parameters of each host that can come apart."""
        return [tensors.moving(*host, walk) for host, walk in zip(self.hosts, self._walks, strict=True)]

    def _alike(self, optimizer_state: str) -> tuple[bool, bool]:
        """Whether all replicas hold the same bits, parameters and optimizer state: they are then left alone.

        A mean of what is alike is not always the same bits, and nothing was to set the replicas apart.
        """
        device = self.exchange.device
        marks = []
        for host, moving in zip(self.hosts, self._moving(), strict=True):
            marks.append(fingerprint(moving, device))
            marks.append(optimizer_mean.mark(host[1], device) if optimizer_state == "average" else marks[-1])
        rows = self.exchange.gather(torch.cat(marks)).cpu()[self.layout.table[:, self.layout.part]].view(-1, 2, 2)
        same = (rows == rows[0]).all(dim=2).all(dim=0).tolist()
        return bool(same[0]), bool(same[1])

    @torch.no_grad()
    def combine(self, weights: NDArray[np.float64], which: Sequence[bool] | None = None) -> list[Tensor]:
        own = weights[self.layout.place * self._each :][: len(self.hosts)].tolist()
        if not self.diverge:
            return tensors.parameters(self.hosts[0][0], which)
        by_place = weights.reshape(self.layout.places, self._each)
        if self._each == 1:
            sources = [tensors.wide(t) for t in tensors.parameters(self.hosts[0][0], which)]
            scales = by_place[:, 0].tolist()
        else:
            scales = [float((row != 0.0).any()) for row in by_place]
            sources = []
            for (model, _), weight in zip(self.hosts, own, strict=True):
                if weight != 0.0:
                    part = torch._foreach_mul([tensors.wide(t) for t in tensors.parameters(model, which)], weight)
                    sources = list(torch._foreach_add(sources, part)) if sources else list(part)
            if not sources:
                sources = [torch.zeros_like(tensors.wide(t)) for t in tensors.parameters(self.hosts[0][0], which)]
        targets = [torch.empty_like(t) for t in sources]
        with translated("combining replicas"):
            self.exchange.reduce(sources, targets, scales, mean=False)
        return targets

    @contextmanager
    def _around(self, number: int) -> Iterator[None]:
        """Around a forward and backward of the replica with a number among this rank's.

        Without data parallelism's own averaging where it is not wanted, or not yet; observed if that was asked for.
        """
        early = number + 1 < self._seats and self._begun
        quiet = self._quiet if self._shares or early else None
        observed, self._observed = self._observed, None
        observing = self._own.listening(*observed) if self._own is not None and observed is not None else nullcontext()
        with quiet() if quiet is not None else nullcontext(), observing:
            yield
        self._summed, self._begun = not early, True


def _leaves_states(merge: Mapping[str, Any]) -> bool:
    """Whether a merge is of parameters alone: a mean that keeps optimizer states, or an outer step from one."""
    inner = merge.get("merge") if merge.get("kind") == "outer" else merge
    return inner == {"kind": "mean", "optimizer": "keep"}
