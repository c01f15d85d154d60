"""The mean of optimizer states that lie on different ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.replicas import optimizer_states
from hdet.replicas.distributed.exchange import Exchange
from hdet.replicas.distributed.fingerprint import fingerprint
from hdet.replicas.held_optimizer import kept_in_groups
from hdet.replicas.optimizer_states import mean_number
from hdet.replicas.tensors import SMALL, joined, local, parameters
from hdet.replicas.tensors import alike as like_tensors

Entry = tuple[int, int, str]
"""Group, place of the parameter in it, and key of the state."""

Structure = dict[Entry, tuple[tuple[int, ...], str]]
"""Shape and dtype of every tensor there is."""


def average(exchange: Exchange, optimizers: Sequence[Optimizer], weights: Sequence[float]) -> None:
    """Give every optimizer of every rank the weighted mean of all replicas' states; 0 leaves a replica out.

    Floating tensors are averaged; counters and integers are taken over from the first that takes part. Numbers which an
    optimizer keeps as state in its parameter groups (Schedule-Free's `weight_sum`, Prodigy's `d`) are averaged too. A
    parameter without a gradient in some replica has no state there and gets the mean of those that have one.

    Args:
        optimizers: of this rank's replicas.
        weights: [places * len(optimizers)], place by place.
    """
    each = len(optimizers)
    mine = weights[exchange.layout.place * each :][:each]
    sound = list(compress(optimizers, mine))
    lead = sound[0] if sound else optimizers[0]
    sums = [float(sum(weights[i * each : (i + 1) * each])) for i in range(exchange.layout.places)]
    own = structure(lead)
    alike = all(structure(optimizer) == own for optimizer in sound if optimizer is not lead)
    averaged = [entry for entry, told in own.items() if _has_mean(*told)]
    counters = [_tensor(lead, entry) for entry, told in own.items() if not _has_mean(*told)]
    told = own if alike else {**own, (exchange.layout.place, -1, ""): ((), "")}
    same_tensors, same_counters = _agree_on(exchange, optimizers, told, counters, weights)
    if same_tensors:
        for optimizer, weight in zip(optimizers, mine, strict=True):
            if not weight:
                _keep_only(optimizer, own)
        exchange.mean_([[_slot(optimizer, e, *own[e]) for e in averaged] for optimizer in optimizers], weights)
        if not same_counters:
            exchange.broadcast(counters, _first(sums))
    else:
        _average_what_some_have(exchange, optimizers, weights)
    others = [optimizer for optimizer in optimizers if optimizer is not lead]
    if others:
        optimizer_states.average([lead], others)


def _average_what_some_have(exchange: Exchange, optimizers: Sequence[Optimizer], weights: Sequence[float]) -> None:
    for entry, (shape, dtype), holders in _union(exchange, optimizers):
        sharing = [weight if holds else 0.0 for weight, holds in zip(weights, holders, strict=True)]
        if not any(sharing):
            for optimizer in optimizers:
                _drop(optimizer, entry)
            continue
        slots = [_slot(optimizer, entry, shape, dtype) for optimizer in optimizers]
        if _has_mean(shape, dtype):
            exchange.mean_([[slot] for slot in slots], sharing)
        else:
            place, number = divmod(_first(sharing), len(slots))
            exchange.broadcast([slots[number]], place)
            for slot in slots:
                slot.copy_(slots[number])


def take_over(exchange: Exchange, optimizers: Sequence[Optimizer], valid: Sequence[bool]) -> None:
    """Overwrite the states of failed replicas' optimizers by the first valid one's, numbers in groups included.

    Its structure is sent first: a parameter that only some replicas use has no state in the others.
    """
    layout, each = exchange.layout, len(optimizers)
    place, number = divmod(list(valid).index(True), each)
    source = optimizers[number] if layout.place == place else None
    every, numbers = exchange.broadcast_object(
        (structure(source), _numbers(source)) if source is not None else None, place
    )
    sent = [
        _tensor(source, entry)
        if source is not None
        else torch.empty(shape, dtype=getattr(torch, named), device=exchange.device)
        for entry, (shape, named) in every.items()
    ]
    exchange.broadcast(sent, place)
    for optimizer, ok in zip(optimizers, valid[layout.place * each :][:each], strict=True):
        if ok:
            continue
        _keep_only(optimizer, every)
        for entry, tensor in zip(every, sent, strict=True):
            _slot(optimizer, entry, *every[entry]).copy_(tensor)
        _set_numbers(optimizer, numbers)


def send(exchange: Exchange, host: tuple[nn.Module, Optimizer], place: int) -> None:
    """Send a replica's parameters, buffers and optimizer state to the rank at `place`, which calls `receive`."""
    model, optimizer = host
    every = structure(optimizer)
    peer, group = exchange.layout.global_peers[place], exchange.layout.peers()
    dist.send_object_list([(every, _numbers(optimizer))], peer, group=group, device=exchange.device)
    for tensor in [*_of(model), *(_tensor(optimizer, entry) for entry in every)]:
        dist.send(tensor.to(exchange.device).contiguous(), peer, group=group)


@torch.no_grad()
def receive(exchange: Exchange, host: tuple[nn.Module, Optimizer], place: int) -> None:
    """Overwrite a replica by the one that the rank at `place` sends."""
    model, optimizer = host
    peer, group = exchange.layout.global_peers[place], exchange.layout.peers()
    told: list[Any] = [None]
    dist.recv_object_list(told, peer, group=group, device=exchange.device)
    every, numbers = told[0]
    _keep_only(optimizer, every)
    for tensor in [*_of(model), *(_slot(optimizer, entry, *every[entry]) for entry in every)]:
        sent = torch.empty(tensor.shape, dtype=tensor.dtype, device=exchange.device)
        dist.recv(sent, peer, group=group)
        tensor.copy_(sent)
    _set_numbers(optimizer, numbers)


def _of(model: nn.Module) -> list[Tensor]:
    return [*parameters(model), *(local(buffer) for buffer in model.buffers())]


def mark(optimizer: Optimizer, device: torch.device) -> Tensor:
    """A fingerprint of an optimizer's tensors, and of the numbers in its groups."""
    own = structure(optimizer)
    numbers = torch.tensor(list(_numbers(optimizer).values()), dtype=torch.float64)
    return fingerprint([*(_tensor(optimizer, entry) for entry in own), numbers, _code(own)], device)


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


def _agree_on(
    exchange: Exchange,
    optimizers: Sequence[Optimizer],
    own: Structure,
    counters: list[Tensor],
    weights: Sequence[float],
) -> tuple[bool, bool]:
    """Average the groups' numbers, and tell whether all peers hold the same tensors, and counters of the same values.

    One small collective. Of counters of more than a few numbers nothing is told.
    """
    numbers = [_numbers(optimizer) for optimizer in optimizers]
    flat = torch.tensor([list(found.values()) for found in numbers], dtype=torch.float64).flatten()
    few = sum(map(Tensor.numel, counters)) <= SMALL
    codes = torch.cat([_code(own), _code_of_values(counters if few else [])])
    table = exchange.gather(torch.cat([codes.view(torch.float64), flat])).cpu()
    rows = table[[int(rank) for rank in exchange.layout.table[:, exchange.layout.part]]]
    taking = [weight for weight in weights if weight]
    sound = rows[:, 2:].reshape(len(weights), -1)[torch.tensor(weights) != 0].tolist()
    for (index, key), values in zip(numbers[0], zip(*sound, strict=True), strict=True):
        apart = any(value != values[0] for value in values)
        for optimizer in optimizers:
            optimizer.param_groups[index][key] = mean_number(values, taking) if apart else values[0]
    # Ranks that hold other parts of the model hold other tensors; each compares with its own peers.
    codes = rows[torch.tensor(exchange.present), :2].contiguous().view(torch.int64)
    same_tensors, same_values = (codes == codes[0]).all(dim=0).tolist()
    return same_tensors, few and same_values


def _union(
    exchange: Exchange, optimizers: Sequence[Optimizer]
) -> list[tuple[Entry, tuple[tuple[int, ...], str], list[bool]]]:
    """What tensors there are, and by replica, place by place, who holds each."""
    gathered = exchange.gather_objects([structure(optimizer) for optimizer in optimizers])
    held: list[Structure] = [own for found in gathered for own in found or [{}] * len(optimizers)]
    every: Structure = {}
    for found in held:
        every.update(found)
    return [(entry, every[entry], [entry in found for found in held]) for entry in sorted(every)]


def _numbers(optimizer: Optimizer) -> dict[tuple[int, str], float]:
    """What an optimizer keeps as state in its groups, as floating numbers, by group and key."""
    found = {(index, key): optimizer.param_groups[index][key] for index, key in kept_in_groups(optimizer)}
    return {place: value for place, value in found.items() if isinstance(value, float)}


def _set_numbers(optimizer: Optimizer, numbers: dict[tuple[int, str], float]) -> None:
    for (index, key), value in numbers.items():
        optimizer.param_groups[index][key] = value


def _code(own: Structure) -> Tensor:
    """[1] int64: a digest of what tensors there are."""
    return _digest(repr(list(own.items())).encode())


def _code_of_values(few: list[Tensor]) -> Tensor:
    """[1] int64: a digest of what some small tensors hold."""
    parts = [joined(own).cpu().view(torch.uint8) for own in like_tensors(few)] if few else []
    return _digest(b"".join(part.numpy().tobytes() for part in parts))


def _digest(data: bytes) -> Tensor:
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return torch.tensor([int.from_bytes(digest, "big", signed=True)], dtype=torch.int64)


def _tensor(optimizer: Optimizer, entry: Entry) -> Tensor:
    index, place, key = entry
    value: Tensor = optimizer.state[optimizer.param_groups[index]["params"][place]][key]
    return local(value)


def _slot(optimizer: Optimizer, entry: Entry, shape: tuple[int, ...], named: str) -> Tensor:
    """The tensor at an entry, made if there is none."""
    index, place, key = entry
    dtype = getattr(torch, named)
    parameter = optimizer.param_groups[index]["params"][place]
    state: dict[str, Any] = optimizer.state.setdefault(parameter, {})
    if state.get(key) is None:
        like = shape == tuple(local(parameter).shape)
        state[key] = torch.zeros_like(parameter, dtype=dtype) if like else torch.zeros(shape, dtype=dtype, device="cpu")
    return local(state[key])


def _keep_only(optimizer: Optimizer, own: Structure) -> None:
    """Drop the tensors that are not of this structure: a replica that failed may hold some that no other has."""
    for entry in structure(optimizer):
        if entry not in own:
            _drop(optimizer, entry)


def _drop(optimizer: Optimizer, entry: Entry) -> None:
    index, place, key = entry
    parameter = optimizer.param_groups[index]["params"][place]
    state = optimizer.state.get(parameter, {})
    state.pop(key, None)
    if not state:
        optimizer.state.pop(parameter, None)


def _has_mean(shape: tuple[int, ...], named: str) -> bool:
    dtype: torch.dtype = getattr(torch, named)
    return dtype.is_floating_point and len(shape) > 0


def _first(weights: Sequence[float]) -> int:
    return next(i for i, weight in enumerate(weights) if weight)
