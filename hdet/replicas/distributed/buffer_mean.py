"""The mean of what is not trained, such as batch statistics or a teacher, that lies on different ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from zlib import crc32

import torch
from torch import Tensor, nn

from hdet.replicas import tensors
from hdet.replicas.dense import can_be_written, has_arithmetic
from hdet.replicas.distributed.exchange import Exchange
from hdet.replicas.distributed.fingerprint import fingerprints
from hdet.replicas.shared_buffers import in_some, names_of


@torch.no_grad()
def average(
    exchange: Exchange,
    models: Sequence[nn.Module],
    shares: Sequence[float],
    *,
    take_first: bool,
    only_means: bool = False,
) -> None:
    """Give every model of every rank the weighted mean of the buffers; those that have none are the first sound one's.

    A buffer that has other shapes in other replicas, as a cache that grows with each rank's data, stays each one's own,
    and so does one that cannot be written over, as a sparse one.

    Args:
        models: of this rank's replicas.
        shares: [places * len(models)] how much each counts, place by place; 0 leaves one out.
        take_first: whether all buffers are the first one's, as DistributedDataParallel has it.
        only_means: those that have no mean stay each model's own.

    Raises:
        StepError: on every rank, where a replica has a buffer that another has not.
    """
    if not any(shares):
        return
    members = [[tensors.local(buffer) for buffer in model.buffers()] for model in models]
    kinds = _of_one_kind(exchange, models, members)
    fits = [same and can_be_written(own) for same, own in zip(kinds, members[0], strict=True)]
    if not any(fits):
        return
    members = [list(compress(own, fits)) for own in members]
    averaged = [yes and not take_first for yes in compress(_with_mean(exchange, models, shares), fits)]
    exchange.mean_([list(compress(own, averaged)) for own in members], shares)
    if not only_means:
        _take_over(exchange, [list(compress(own, [not yes for yes in averaged])) for own in members], shares)


@torch.no_grad()
def average_written(
    exchange: Exchange, frozen: Sequence[Sequence[Tensor]], written: Sequence[bool], shares: Sequence[float]
) -> None:
    """Give all replicas one value of each frozen parameter that somebody writes, as of a teacher: the weighted mean.

    Of integers, as quantised weights are, and of other types without arithmetic it is the first sound one's. What is
    alike everywhere keeps its bits: a mean of what is alike is not always the same.

    Args:
        frozen: for each of this rank's replicas, alike on all ranks.
        written: which of them this rank knows to be written; what one rank knows counts on all.
    """
    layout, device = exchange.layout, exchange.device
    # Of all ranks, and not of one part of a sharded model alone, for all have to come to the next collective.
    seen = exchange.gather(torch.tensor(written, dtype=torch.int8).to(device)).bool().any(dim=0)
    if not seen.any():
        return
    marks = torch.zeros(len(frozen), len(written), 2, dtype=torch.int64, device=device)
    for row, own in zip(marks, frozen, strict=True):
        row[seen] = fingerprints(list(compress(own, seen.tolist())), device)
    rows = exchange.gather(marks.flatten())[layout.table[exchange.present, layout.part]].view(-1, *marks.shape[1:])
    apart = (rows != rows[0]).any(dim=2).any(dim=0).tolist()
    members = [list(compress(own, apart)) for own in frozen]
    meet = [tensors.is_inexact(own) and has_arithmetic(own) for own in members[0]]
    exchange.mean_([list(compress(own, meet)) for own in members], shares)
    _take_over(exchange, [list(compress(own, [not yes for yes in meet])) for own in members], shares)


def _take_over(exchange: Exchange, members: Sequence[Sequence[Tensor]], shares: Sequence[float]) -> None:
    """Give all replicas what the first that has a share holds."""
    first, number = divmod([bool(share) for share in shares].index(True), len(members))
    exchange.broadcast(members[number], first)
    for own in members:
        if own is not members[number]:
            tensors.copy_(own, members[number])


def alike(exchange: Exchange, model: nn.Module) -> bool:
    """Whether the buffers have the same names, shapes and types on all ranks; a cache grows with each rank's data."""
    told = repr([(name, tuple(buffer.shape), buffer.dtype) for name, buffer in model.named_buffers()])
    digest = float(crc32(told.encode()))
    row = torch.tensor([digest], dtype=torch.float64, device=exchange.device)
    return bool((exchange.gather(row) == digest).all())


def _of_one_kind(exchange: Exchange, models: Sequence[nn.Module], members: Sequence[Sequence[Tensor]]) -> list[bool]:
    """Which buffers have one shape and type in all replicas, and can be written over in all or in none.

    Raises:
        StepError: on every rank, where a replica has a buffer that another has not.
    """
    layout = exchange.layout  # of a model in parts each is compared with its peers
    names = names_of(models)
    codes = [[crc32(repr((tuple(b.shape), b.dtype, can_be_written(b))).encode()) for b in own] for own in members]
    # Of one length, however many buffers a rank has: a collective of other lengths ends the processes.
    digests = [crc32(repr(own).encode()) for told in (names, codes) for own in told]
    table = exchange.gather(torch.tensor(digests, dtype=torch.int64)).cpu().view(-1, 2, len(models))
    told = table[layout.table[exchange.present]]  # [places, parts, 2, models]; what is gone has told nothing
    if bool((told[:, :, 0] != told[0, 0, 0, 0]).any()):
        raise in_some([own for held in exchange.gather_objects(names, of_all=True) for own in held or []])
    if bool((told[:, :, 1] == told[:1, :, 1, :1]).all()):
        return [True] * len(codes[0])
    rows = exchange.gather(torch.tensor(codes, dtype=torch.int64).flatten())
    rows = rows[layout.table[exchange.present, layout.part]].view(-1, len(codes[0]))
    return [bool(same) for same in (rows == rows[0]).all(dim=0).tolist()]


def _with_mean(exchange: Exchange, models: Sequence[nn.Module], shares: Sequence[float]) -> list[bool]:
    """Which buffers have a mean in all replicas that take part: a failed one's may hold anything."""
    each = len(models)
    own = shares[exchange.layout.place * each :][:each]
    flags = [tensors.with_mean(model) for model, share in zip(models, own, strict=True) if share]
    held = torch.tensor(flags or [[False] * len(list(models[0].buffers()))], dtype=torch.float32)
    votes = held.sum(dim=0).to(exchange.device)
    taking = [float(any(shares[i : i + each])) for i in range(0, len(shares), each)]
    exchange.reduce([votes], [votes], taking, mean=False)
    return [vote == sum(map(bool, shares)) for vote in votes.tolist()]
