"""The mean of optimizer states that lie on different ranks."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Container, Iterator, Sequence
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hdet.replicas import optimizer_states
from hdet.replicas.dense import can_be_written, resized
from hdet.replicas.distributed.exchange import Exchange
from hdet.replicas.distributed.fingerprint import fingerprint
from hdet.replicas.held_optimizer import home_of
from hdet.replicas.optimizer_numbers import kept_in_groups
from hdet.replicas.optimizer_states import is_of_elements, mean_number
from hdet.replicas.tensors import SMALL, joined, local, parameters
from hdet.replicas.tensors import alike as like_tensors

Entry = tuple[int, int, str]
"""Group, place of the parameter in it, and key of the state."""

Structure = dict[Entry, tuple[tuple[int, ...], str]]
"""Shape and dtype of every tensor there is."""

Plain = dict[Entry, Any]
"""Every number and text, and list or mapping of these, as an optimizer's `state["step"] = 0`; `None` too."""


def average(exchange: Exchange, optimizers: Sequence[Optimizer], weights: Sequence[float]) -> None:
    """Give every optimizer of every rank the weighted mean of all replicas' states; 0 leaves a replica out.

    Floating and complex tensors of a parameter's elements are averaged; counters, integers and Python's own numbers are
    taken over from the first that takes part; lists of tensors and other objects stay each replica's own. Numbers which
    an optimizer keeps as state in its parameter groups (Schedule-Free's `weight_sum`, Prodigy's `d`) are averaged too,
    integers of these (`k`) taken over. A parameter without a gradient in some replica has no state there and gets the
    mean of those that have one.

    Args:
        optimizers: of this rank's replicas.
        weights: [places * len(optimizers)], place by place.
    """
    each = len(optimizers)
    mine = weights[exchange.layout.place * each :][:each]
    sound = list(compress(optimizers, mine))
    lead = sound[0] if sound else optimizers[0]
    sums = [float(sum(weights[i * each : (i + 1) * each])) for i in range(exchange.layout.places)]
    own, others = structure(lead), plain(lead)
    alike = all(structure(optimizer) == own for optimizer in sound if optimizer is not lead)
    alike_others = all(plain(optimizer) == others for optimizer in sound if optimizer is not lead)
    averaged = [entry for entry, told in own.items() if _has_mean(lead, entry, *told)]
    counters = [_tensor(lead, entry) for entry, told in own.items() if not _has_mean(lead, entry, *told)]
    # Where replicas here differ, so does what is told from all other places'.
    told = [found if same else (exchange.layout.place, found) for found, same in ((own, alike), (others, alike_others))]
    same_tensors, same_others, same_counters = _agree_on(exchange, optimizers, told, counters, weights)
    if not (same_others and alike_others):
        _take_over_plain(exchange, optimizers, weights)
    if same_tensors and alike:
        for optimizer, weight in zip(optimizers, mine, strict=True):
            if not weight:
                _keep_only(optimizer, own.keys() | plain(lead).keys())  # what was taken over, too
        exchange.mean_([[_slot(optimizer, e, *own[e]) for e in averaged] for optimizer in optimizers], weights)
        if not same_counters:
            exchange.broadcast(counters, _first(sums))
    else:
        _average_what_some_have(exchange, optimizers, weights)
    rest = [optimizer for optimizer in optimizers if optimizer is not lead]
    if rest:
        optimizer_states.average([lead], rest)


def _average_what_some_have(exchange: Exchange, optimizers: Sequence[Optimizer], weights: Sequence[float]) -> None:
    for entry, (shape, dtype), holders in _union(exchange, optimizers):
        sharing = [weight if holds else 0.0 for weight, holds in zip(weights, holders, strict=True)]
        if not any(sharing):
            for optimizer in optimizers:
                _drop(optimizer, entry)
            continue
        slots = [_slot(optimizer, entry, shape, dtype) for optimizer in optimizers]
        if _has_mean(optimizers[0], entry, shape, dtype):
            exchange.mean_([[slot] for slot in slots], sharing)
        else:
            place, number = divmod(_first(sharing), len(slots))
            exchange.broadcast([slots[number]], place)
            for slot in slots:
                slot.copy_(slots[number])


def _take_over_plain(exchange: Exchange, optimizers: Sequence[Optimizer], weights: Sequence[float]) -> None:
    """Give every optimizer the plain values of the first that takes part and has one."""
    gathered = exchange.gather_objects([plain(optimizer) for optimizer in optimizers])
    held: list[Plain] = [own for found in gathered for own in found or [{}] * len(optimizers)]
    sound = list(compress(held, weights))
    first: Plain = {}
    for own in reversed(sound):
        first.update({entry: value for entry, value in own.items() if value is not None})
    for optimizer in optimizers:
        for entry in plain(optimizer):
            if not any(entry in own for own in sound):
                _drop(optimizer, entry)
        _set_plain(optimizer, first)


def take_over(exchange: Exchange, optimizers: Sequence[Optimizer], valid: Sequence[bool]) -> None:
    """Overwrite the states of failed replicas' optimizers by the first valid one's, numbers in groups included.

    Its structure is sent first: a parameter that only some replicas use has no state in the others.
    """
    layout, each = exchange.layout, len(optimizers)
    place, number = divmod(list(valid).index(True), each)
    source = optimizers[number] if layout.place == place else None
    every, others, numbers = exchange.broadcast_object(
        (structure(source), plain(source), _numbers(source)) if source is not None else None, place
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
        _keep_only(optimizer, every.keys() | others.keys())
        for entry, tensor in zip(every, sent, strict=True):
            _slot(optimizer, entry, *every[entry]).copy_(tensor)
        _set_plain(optimizer, others)
        _set_numbers(optimizer, numbers)


def send(exchange: Exchange, host: tuple[nn.Module, Optimizer], place: int) -> None:
    """Send a replica's parameters, buffers and optimizer state to the rank at `place`, which calls `receive`."""
    model, optimizer = host
    every = structure(optimizer)
    peer, group = exchange.layout.global_peers[place], exchange.layout.peers()
    shapes = [tuple(buffer.shape) for buffer in _buffers(model)]
    told = (every, plain(optimizer), _numbers(optimizer), shapes)
    dist.send_object_list([told], peer, group=group, device=exchange.device)
    for tensor in [*parameters(model), *_buffers(model), *(_tensor(optimizer, entry) for entry in every)]:
        dist.send(tensor.to(exchange.device).contiguous(), peer, group=group)


@torch.no_grad()
def receive(exchange: Exchange, host: tuple[nn.Module, Optimizer], place: int) -> None:
    """Overwrite a replica by the one that the rank at `place` sends."""
    model, optimizer = host
    peer, group = exchange.layout.global_peers[place], exchange.layout.peers()
    told: list[Any] = [None]
    dist.recv_object_list(told, peer, group=group, device=exchange.device)
    every, others, numbers, shapes = told[0]
    _keep_only(optimizer, every.keys() | others.keys())
    buffers = [resized(buffer, shape) for buffer, shape in zip(_buffers(model), shapes, strict=True)]
    for tensor in [*parameters(model), *buffers, *(_slot(optimizer, entry, *every[entry]) for entry in every)]:
        sent = torch.empty(tensor.shape, dtype=tensor.dtype, device=exchange.device)
        dist.recv(sent, peer, group=group)
        tensor.copy_(sent)
    _set_plain(optimizer, others)
    _set_numbers(optimizer, numbers)


def _buffers(model: nn.Module) -> list[Tensor]:
    """Those that can be written over; others, as sparse ones, nothing trains."""
    return list(filter(can_be_written, map(local, model.buffers())))


def mark(optimizer: Optimizer, device: torch.device) -> Tensor:
    """A fingerprint of an optimizer's state, and of the numbers in its groups."""
    own = structure(optimizer)
    numbers = torch.tensor(list(_numbers(optimizer).values()), dtype=torch.float64)
    codes = [_code(own), _code(plain(optimizer))]
    return fingerprint([*(_tensor(optimizer, entry) for entry in own), numbers, *codes], device)


def structure(optimizer: Optimizer) -> Structure:
    """Every tensor of an optimizer's state, as this rank holds it."""
    found: Structure = {}
    for entry, value in _entries(optimizer):
        if isinstance(value, Tensor):
            own = local(value)
            found[entry] = (tuple(own.shape), str(own.dtype).removeprefix("torch."))
    return found


def plain(optimizer: Optimizer) -> Plain:
    """What an optimizer's state holds as Python's own numbers and texts."""
    return {
        entry: value
        for entry, value in _entries(optimizer)
        if all(isinstance(leaf, (int, float, str, type(None))) for leaf in tree_leaves(value))
    }


def _entries(optimizer: Optimizer) -> Iterator[tuple[Entry, Any]]:
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            state = optimizer.state.get(parameter, {})
            for key in sorted(state, key=str):  # a state that was filled by a merge has another order
                yield (index, place, key), state[key]


def _agree_on(
    exchange: Exchange,
    optimizers: Sequence[Optimizer],
    told: Sequence[object],
    counters: list[Tensor],
    weights: Sequence[float],
) -> list[bool]:
    """Average the groups' numbers, and tell whether all peers told the same things, and hold the same counters.

    One small collective. Of counters of more than a few numbers nothing is told.
    """
    numbers = [_numbers(optimizer) for optimizer in optimizers]
    flat = torch.tensor([list(found.values()) for found in numbers], dtype=torch.float64).flatten()
    few = sum(map(Tensor.numel, counters)) <= SMALL
    codes = torch.cat([*map(_code, told), _code_of_values(counters if few else [])])
    table = exchange.gather(torch.cat([codes.view(torch.float64), flat])).cpu()
    rows = table[[int(rank) for rank in exchange.layout.table[:, exchange.layout.part]]]
    taking = [weight for weight in weights if weight]
    sound = rows[:, len(codes) :].reshape(len(weights), -1)[torch.tensor(weights, device="cpu") != 0].tolist()
    for (index, key), values in zip(numbers[0], zip(*sound, strict=True), strict=True):
        own = numbers[0][index, key]
        apart = any(value != values[0] for value in values)
        merged = mean_number(values, taking) if apart and isinstance(own, float) else values[0]
        for optimizer in optimizers:
            optimizer.param_groups[index][key] = type(own)(merged)
    # Ranks that hold other parts of the model hold other tensors; each compares with its own peers.
    codes = rows[torch.tensor(exchange.present, device="cpu"), : len(codes)].contiguous().view(torch.int64)
    *same, same_values = (codes == codes[0]).all(dim=0).tolist()
    return [*same, few and same_values]


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


def _numbers(optimizer: Optimizer) -> dict[tuple[int, str], float | int]:
    """What an optimizer keeps as state in its groups, as numbers, by group and key."""
    found = {(index, key): optimizer.param_groups[index][key] for index, key in kept_in_groups(optimizer)}
    return {
        place: value
        for place, value in found.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _set_plain(optimizer: Optimizer, values: Plain) -> None:
    for (index, place, key), value in values.items():
        parameter = optimizer.param_groups[index]["params"][place]
        optimizer.state.setdefault(parameter, {})[key] = copy.deepcopy(value)


def _set_numbers(optimizer: Optimizer, numbers: dict[tuple[int, str], float | int]) -> None:
    for (index, key), value in numbers.items():
        optimizer.param_groups[index][key] = value


def _code(own: object) -> Tensor:
    """[1] int64: a digest of plain values, such as what tensors there are."""
    return _digest(repr(own).encode())


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
        like = shape == tuple(local(parameter).shape) and is_of_elements(len(shape), key, parameter)
        home = home_of(parameter, optimizer.param_groups[index], key)
        state[key] = torch.zeros_like(parameter, dtype=dtype) if like else torch.zeros(shape, dtype=dtype, device=home)
    return local(state[key])


def _keep_only(optimizer: Optimizer, own: Container[Entry]) -> None:
    """Drop tensors and plain values at other entries: a replica that failed may hold some that no other has."""
    for entry in (*structure(optimizer), *plain(optimizer)):
        if entry not in own:
            _drop(optimizer, entry)


def _drop(optimizer: Optimizer, entry: Entry) -> None:
    index, place, key = entry
    parameter = optimizer.param_groups[index]["params"][place]
    state = optimizer.state.get(parameter, {})
    state.pop(key, None)
    if not state:
        optimizer.state.pop(parameter, None)


def _has_mean(optimizer: Optimizer, entry: Entry, shape: tuple[int, ...], named: str) -> bool:
    index, place, key = entry
    dtype: torch.dtype = getattr(torch, named)
    inexact = dtype.is_floating_point or dtype.is_complex
    return inexact and is_of_elements(len(shape), key, optimizer.param_groups[index]["params"][place])


def _first(weights: Sequence[float]) -> int:
    return next(i for i, weight in enumerate(weights) if weight)
