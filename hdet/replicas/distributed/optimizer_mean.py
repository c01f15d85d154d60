"""The mean of optimizer states that lie on different ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from hdet.replicas.distributed.exchange import Exchange
from hdet.replicas.tensors import local

Entry = tuple[int, int, str]
"""Group, place of the parameter in it, and key of the state."""

Structure = dict[Entry, tuple[tuple[int, ...], str]]
"""Shape and dtype of every tensor there is."""


def average(exchange: Exchange, optimizer: Optimizer, weights: Sequence[float]) -> None:
    """Give every rank's optimizer the weighted mean of the states over places.

    Floating tensors are averaged; counters and integers are taken over from the first place of weight above 0.
    Numbers which an optimizer keeps in its parameter groups (Schedule-Free's `weight_sum`, Prodigy's `d`) are
    averaged too; values of knobs are among them, and have to be written anew. A parameter without a gradient on
    some rank has no state there and gets the mean of those that have one.
    """
    own = structure(optimizer)
    if _agree_on(exchange, optimizer, own, weights):
        held = [(entry, _tensor(optimizer, entry)) for entry in own]
        averaged = [tensor for _, tensor in held if _has_mean(tensor)]
        taken = [tensor for _, tensor in held if not _has_mean(tensor)]
        exchange.reduce(averaged, averaged, weights, mean=True)
        exchange.broadcast(taken, _first(weights))
        return
    for entry, (shape, dtype), holders in _union(exchange, own):
        tensor = _slot(optimizer, entry, shape, getattr(torch, dtype))
        sharing = [weight if holds else 0.0 for weight, holds in zip(weights, holders, strict=True)]
        if not any(sharing):
            continue
        if _has_mean(tensor):
            exchange.reduce([tensor], [tensor], sharing, mean=True)
        else:
            exchange.broadcast([tensor], _first(sharing))


def take_over(exchange: Exchange, optimizers: Sequence[Optimizer], wanting: Sequence[bool], place: int) -> None:
    """Overwrite the states of this rank's `wanting` optimizers by that of the first optimizer at a place."""
    own = structure(optimizers[0])
    source = [_tensor(optimizers[0], entry) for entry in own]
    sending = exchange.layout.place == place
    received = source if sending else [torch.empty_like(tensor) for tensor in source]
    exchange.broadcast(received, place)
    for optimizer, wants in zip(optimizers, wanting, strict=True):
        if wants:
            for entry, tensor in zip(own, received, strict=True):
                _slot(optimizer, entry, tuple(tensor.shape), tensor.dtype).copy_(tensor)


def structure(optimizer: Optimizer) -> Structure:
    """Every tensor of an optimizer's state, as this rank holds it."""
    found: Structure = {}
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    own = local(value)
                    found[index, place, key] = (tuple(own.shape), str(own.dtype).removeprefix("torch."))
    return found


def _agree_on(exchange: Exchange, optimizer: Optimizer, own: Structure, weights: Sequence[float]) -> bool:
    """Average the groups' numbers, and tell whether all peers hold the same tensors; one small collective."""
    numbers = [
        (group, key) for group in optimizer.param_groups for key, value in group.items() if isinstance(value, float)
    ]
    digest = hashlib.blake2b(repr(list(own.items())).encode(), digest_size=8).digest()
    code = torch.tensor([int.from_bytes(digest, "big", signed=True)], dtype=torch.int64)
    row = torch.cat(
        [code.view(torch.float64), torch.tensor([group[key] for group, key in numbers], dtype=torch.float64)]
    )
    table = exchange.gather(row).cpu()
    rows = table[[int(rank) for rank in exchange.layout.table[:, exchange.layout.part]]]
    for position, (group, key) in enumerate(numbers, start=1):
        values = [(float(rows[i, position]), weight) for i, weight in enumerate(weights) if weight]
        if any(value != values[0][0] for value, _ in values):
            group[key] = sum(value * weight for value, weight in values) / sum(weight for _, weight in values)
    # Ranks that hold other parts of the model hold other tensors; each compares with its own peers.
    codes = rows[:, 0].contiguous().view(torch.int64)
    return bool((codes == codes[0]).all())


def _union(exchange: Exchange, own: Structure) -> list[tuple[Entry, tuple[tuple[int, ...], str], list[bool]]]:
    held: list[Any] = [None] * exchange.layout.places
    dist.all_gather_object(held, own, group=exchange.layout.peers())
    every: Structure = {}
    for found in held:
        every.update(found)
    return [(entry, every[entry], [entry in found for found in held]) for entry in sorted(every)]


def _tensor(optimizer: Optimizer, entry: Entry) -> Tensor:
    index, place, key = entry
    value: Tensor = optimizer.state[optimizer.param_groups[index]["params"][place]][key]
    return local(value)


def _slot(optimizer: Optimizer, entry: Entry, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    index, place, key = entry
    parameter = optimizer.param_groups[index]["params"][place]
    state: dict[str, Any] = optimizer.state.setdefault(parameter, {})
    if state.get(key) is None:
        like = shape == tuple(local(parameter).shape)
        state[key] = torch.zeros_like(parameter, dtype=dtype) if like else torch.zeros(shape, dtype=dtype, device="cpu")
    return local(state[key])


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() > 0


def _first(weights: Sequence[float]) -> int:
    return next(i for i, weight in enumerate(weights) if weight)
