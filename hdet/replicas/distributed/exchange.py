"""Collectives on lists of tensors through persistent flat buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hdet.replicas.distributed.layout import Layout
from hdet.replicas.tensors import copy_, mean_, wide_type

CAPACITY = 2**22
"""Elements in a bucket: 16 MiB of float32. Two are kept, so that one is filled while the other travels."""

FEW = 32
"""Pieces in a bucket up to which one call for each is no matter."""

GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
"""By name, since a torch that is built without `torch.distributed` has neither."""


class Exchange:
    """Reduces and broadcasts lists of tensors over the peers of a layout.

    Every rank calls the same method with tensors of the same sizes in the same order. Tensors may be of any
    dtype, shape, stride and number, empty and 0-dim ones included; one larger than a bucket goes in pieces.

    Args:
        layout: whose peers take part.
        device: where buckets lie; one that the group's backend can send from.
        exact: add in the order of the places rather than in that of the backend's all-reduce. As many bytes, more
            work; the result is bit for bit that of `hdet.replicas.tensors.mean_` over the same tensors, and
            members that are identical stay as they are.
        capacity: elements in a bucket.

    Attributes:
        present: by place, whether a peer is there.
    """

    def __init__(self, layout: Layout, device: torch.device, exact: bool, capacity: int = CAPACITY) -> None:
        self.layout = layout
        self.device = device
        self.exact = exact
        self.present = [True] * layout.places
        self._capacity = -(-capacity // layout.places) * layout.places
        self._kept: dict[tuple[torch.dtype, int], Tensor] = {}

    @property
    def bytes_held(self) -> int:
        """The memory of the persistent buckets."""
        return sum(bucket.numel() * bucket.element_size() for bucket in self._kept.values())

    @torch.no_grad()
    def reduce(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], weights: Sequence[float], *, mean: bool
    ) -> None:
        """targets <- sum_i weights[i] sources_i over places i, divided by the sum of weights if `mean`.

        Reduced in float32 at least; weights are applied before the sum, so that half-precision tensors cannot
        overflow. A place of weight 0 is left out, NaN or not. `sources` and `targets` may be the same tensors.
        """
        total = sum(weights)
        own = weights[self.layout.place] / total if mean else weights[self.layout.place]
        under_way: list[tuple[Callable[[], object], Bucket, Tensor]] = []
        for number, bucket in enumerate(self._buckets(sources, targets, narrow=self.exact)):
            flat = self._memory(bucket.dtype, number % 2, bucket.padded(self.layout.places))
            bucket.pack(flat, 1.0 if self.exact else own)
            if self.exact:
                rows = self._slices(flat, self._memory(flat.dtype, 1 - number % 2, flat.numel()))
                self._fold_and_tell(flat, rows, weights, mean)
                bucket.unpack(flat)
                continue
            under_way.append((self.begin_sum(flat), bucket, flat))
            if len(under_way) == 2:
                _land(*under_way.pop(0))
        for item in under_way:
            _land(*item)

    @torch.no_grad()
    def mean_(self, members: Sequence[Sequence[Tensor]], weights: Sequence[float]) -> None:
        """Overwrite this rank's members, one or several replicas' tensors, by the weighted mean of all places'.

        Args:
            weights: [places * len(members)], place by place; 0 leaves a member out, NaN or not.
        """
        each = len(members)
        if self.exact and each > 1:
            self._mean_in_order(members, weights)
            return
        own = weights[self.layout.place * each :][:each]
        sound = list(compress(members, own))
        lead = sound[0] if sound else members[0]
        if len(sound) > 1:
            mean_(sound, [lead], [weight for weight in own if weight])
        sums = [float(sum(weights[i * each : (i + 1) * each])) for i in range(self.layout.places)]
        self.reduce(lead, lead, sums, mean=True)
        for other in members:
            if other is not lead:
                copy_(other, lead)

    def _mean_in_order(self, members: Sequence[Sequence[Tensor]], weights: Sequence[float]) -> None:
        """Every member's bucket is sent in slices, and each rank adds up its slice of all replicas'."""
        for buckets in zip(*(self._buckets(own, own, narrow=True) for own in members), strict=True):
            flat = self._memory(buckets[0].dtype, 0, buckets[0].padded(self.layout.places))
            rows = []
            for bucket in buckets:
                bucket.pack(flat)
                rows.append(self._slices(flat, torch.empty_like(flat)))
            self._fold_and_tell(flat, [row for of_place in zip(*rows, strict=True) for row in of_place], weights, True)
            for bucket in buckets:
                bucket.unpack(flat)

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor], place: int) -> None:
        """Overwrite every rank's tensors by those of the rank at `place`."""
        for bucket in self._buckets(tensors, tensors, narrow=True):
            flat = self._memory(bucket.dtype, 0, bucket.size)
            if self.layout.place == place:
                bucket.pack(flat)
            self.send(flat, place)
            if self.layout.place != place:
                bucket.unpack(flat)

    def gather(self, row: Tensor) -> Tensor:
        """[M] of each rank -> [ranks, M], over all ranks of the layout, in the order of their group."""
        row = row.to(self.device).contiguous()
        ranks = dist.get_world_size(self.layout.everyone())
        rows = torch.empty(ranks * row.numel(), dtype=row.dtype, device=self.device)
        getattr(dist, GATHER)(rows, row, group=self.layout.everyone())
        return rows.view(ranks, row.numel())

    def gather_objects(self, own: Any, *, of_all: bool = False) -> list[Any]:
        """An object of each peer, by place, or of all ranks of the layout; None for a place that is vacant."""
        group = self.layout.everyone() if of_all else self.layout.peers()
        held: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(held, own, group=group)
        return held if of_all else [held[rank] for rank in self.layout.ranks_of_peers()]

    def broadcast_object(self, own: Any, place: int) -> Any:
        """The object of the peer at `place`."""
        told = [own]
        dist.broadcast_object_list(told, self.layout.global_peers[place], self.layout.peers(), device=self.device)
        return told[0]

    def begin_sum(self, flat: Tensor) -> Callable[[], object]:
        """Begin to overwrite a bucket by the sum over all peers. Returns what waits for it."""
        work = dist.all_reduce(flat, group=self.layout.peers(), async_op=True)
        assert work is not None
        wait: Callable[[], object] = work.wait
        return wait

    def send(self, flat: Tensor, place: int) -> None:
        """Overwrite every peer's bucket by that of the peer at `place`."""
        # As bytes: not every backend knows 16-bit integers or float8.
        dist.broadcast(flat.view(torch.uint8), self.layout.global_peers[place], group=self.layout.peers())

    def _slices(self, flat: Tensor, rows: Tensor) -> list[Tensor]:
        """This rank's slice of every place's bucket, [M / places] each, in the memory of `rows`."""
        dist.all_to_all_single(rows, flat, group=self.layout.peers())
        by_rank = rows.view(self.layout.places, -1)
        return [by_rank[rank] for rank in self.layout.ranks_of_peers()]

    def _fold_and_tell(self, flat: Tensor, rows: Sequence[Tensor], weights: Sequence[float], mean: bool) -> None:
        """Each rank adds up its slice, and sends the sum to all."""
        getattr(dist, GATHER)(flat, fold(rows, weights, mean).to(flat.dtype), group=self.layout.peers())

    def _memory(self, dtype: torch.dtype, which: int, size: int) -> Tensor:
        kept = self._kept.get((dtype, which))
        if kept is None or kept.numel() < size:
            kept = self._kept[dtype, which] = torch.empty(size, dtype=dtype, device=self.device)
        return kept[:size]

    def _buckets(self, sources: Sequence[Tensor], targets: Sequence[Tensor], narrow: bool) -> Iterator[Bucket]:
        """The pieces of the tensors, dtype by dtype, in buckets of at most the capacity."""
        by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for source, target in zip(sources, targets, strict=True):
            if source.numel():
                wide = source.dtype if narrow else wide_type(source.dtype)
                by_dtype.setdefault(wide, []).append((source, target))
        for dtype, pairs in by_dtype.items():
            bucket = Bucket(dtype)
            for source, target in pairs:
                flat_source = _flat(source)
                flat_target = flat_source if target is source else _flat(target)
                start, count = 0, source.numel()
                if bucket.size + count <= self._capacity:
                    bucket.add(flat_source, flat_target)
                    start = count
                while start < count:
                    length = min(count - start, self._capacity - bucket.size)
                    if length == 0:
                        yield bucket
                        bucket = Bucket(dtype)
                        continue
                    bucket.add(flat_source[start : start + length], flat_target[start : start + length])
                    start += length
                if flat_target.data_ptr() != target.data_ptr():
                    bucket.strided.append((target, flat_target))
            if bucket.size:
                yield bucket


class Bucket:
    """Pieces of tensors that travel together."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.size = 0
        self.strided: list[tuple[Tensor, Tensor]] = []
        self._sources: list[Tensor] = []
        self._targets: list[Tensor] = []

    def add(self, source: Tensor, target: Tensor) -> None:
        self._sources.append(source)
        self._targets.append(target)
        self.size += source.numel()

    def padded(self, multiple: int) -> int:
        """The size, rounded up so that it divides evenly."""
        return -(-self.size // multiple) * multiple

    def pack(self, flat: Tensor, scale: float = 1.0) -> None:
        """Write the pieces, scaled, into `flat`; zeros behind them, and everywhere at scale 0."""
        if scale == 0.0:
            flat.zero_()
            return
        filled = flat[: self.size]
        if len(self._sources) <= FEW and all(t.dtype == flat.dtype and t.device == flat.device for t in self._sources):
            # One pass over memory instead of two: what a merge of large tensors costs beside the network.
            views = torch.split(filled, [piece.numel() for piece in self._sources])
            for piece, view in zip(self._sources, views, strict=True):
                if scale == 1.0:
                    view.copy_(piece)
                else:
                    torch.mul(piece, scale, out=view)
        else:
            torch.cat([piece.to(flat.device, flat.dtype) for piece in self._sources], out=filled)
            if scale != 1.0:
                filled.mul_(scale)
        flat[self.size :].zero_()

    def unpack(self, flat: Tensor) -> None:
        pieces = torch.split(flat[: self.size], [target.numel() for target in self._targets])
        torch._foreach_copy_(self._targets, list(pieces))
        for target, copied in self.strided:
            target.copy_(copied.view(target.shape))


def fold(rows: Sequence[Tensor] | Tensor, weights: Sequence[float], mean: bool) -> Tensor:
    """[M] of each place -> [M], in the order of the places and in float32 at least; weight 0 leaves a row out.

    A mean is first - sum_i w_i (first - row_i) / sum_i w_i, as `hdet.replicas.tensors.mean_` computes it.

    >>> fold(torch.tensor([[1.0, 2.0], [float("nan"), 0.0], [3.0, 2.0]]), [1, 0, 1], mean=True)
    tensor([2., 2.])
    """
    wide = wide_type(rows[0].dtype)
    taking = [i for i, weight in enumerate(weights) if weight != 0.0]
    first = rows[taking[0]].to(wide)
    if not mean:
        total = first * weights[taking[0]]
        for i in taking[1:]:
            total.add_(rows[i].to(wide) * weights[i])
        return total
    if len(taking) == 1:
        return first
    total = torch.zeros_like(first)
    for i in taking[1:]:
        difference = first - rows[i].to(wide)
        total.add_(difference if weights[i] == 1 else difference * weights[i])
    return first - total.mul_(1.0 / sum(weights))


def _flat(tensor: Tensor) -> Tensor:
    """One dimension, in the tensor's own memory where it lies in one piece, else a copy; wanted without autograd."""
    return tensor.reshape(-1)


def _land(wait: Callable[[], object], bucket: Bucket, flat: Tensor) -> None:
    wait()
    bucket.unpack(flat)
