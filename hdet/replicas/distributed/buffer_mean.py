"""The mean of buffers, such as batch statistics, that lie on different ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from zlib import crc32

import torch
from torch import nn

from hdet.replicas import tensors
from hdet.replicas.distributed.exchange import Exchange


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

    Args:
        models: of this rank's replicas.
        shares: [places * len(models)] how much each counts, place by place; 0 leaves one out.
        take_first: whether all buffers are the first one's, as DistributedDataParallel has it.
        only_means: those that have no mean stay each model's own.
    """
    members = [[tensors.local(buffer) for buffer in model.buffers()] for model in models]
    if not members[0] or not any(shares):
        return
    first, number = divmod([bool(share) for share in shares].index(True), len(members))
    averaged = [yes and not take_first for yes in _with_mean(exchange, models, shares)]
    others = [not yes for yes in averaged]
    exchange.mean_([list(compress(own, averaged)) for own in members], shares)
    if only_means:
        return
    exchange.broadcast(list(compress(members[number], others)), first)
    for own in members:
        if own is not members[number]:
            tensors.copy_(list(compress(own, others)), list(compress(members[number], others)))


def alike(exchange: Exchange, model: nn.Module) -> bool:
    """Whether the buffers have the same names, shapes and types on all ranks; a cache grows with each rank's data."""
    told = repr([(name, tuple(buffer.shape), buffer.dtype) for name, buffer in model.named_buffers()])
    digest = float(crc32(told.encode()))
    row = torch.tensor([digest], dtype=torch.float64, device=exchange.device)
    return bool((exchange.gather(row) == digest).all())


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
