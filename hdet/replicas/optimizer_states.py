"""The mean of several optimizers' states."""

from __future__ import annotations

import copy
from collections.abc import Container, Sequence
from itertools import chain, compress
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hdet.replicas import tensors
from hdet.replicas.optimizer_numbers import kept_in_groups


def average(sound: Sequence[Optimizer], every: Sequence[Optimizer], weights: Sequence[float] | None = None) -> None:
    """Give every optimizer the mean state of the sound ones, weighted where there are weights.

    Floating and complex tensors of a parameter's elements are averaged. Counters and all else are taken over from the
    first that holds them. A parameter without a gradient in some replica has no state there; it gets that of those
    where it has one. A tensor or number that no sound one holds, none keeps.

    Numbers which an optimizer keeps as state in its parameter groups (Schedule-Free's `weight_sum`, Prodigy's `d`) are
    averaged too. Learning rates and the like are not: they are the user's, a scheduler's or a knob's.
    """
    # Tensors that all hold are averaged in one call.
    members: list[list[Tensor]] = [[] for _ in sound]
    targets: list[list[Tensor]] = [[] for _ in every]
    for index, group in enumerate(sound[0].param_groups):
        for place in range(len(group["params"])):
            held = [_state(optimizer, index, place) for optimizer in sound]
            keys = dict.fromkeys(key for state in held for key in state)
            for optimizer in every:
                _keep_only(optimizer, index, place, keys)
            for key in keys:
                holders = [state.get(key) is not None for state in held]
                values = [state[key] for state, holds in zip(held, holders, strict=True) if holds]
                if not values:
                    continue
                given = [_slot(optimizer, index, place, key, values[0]) for optimizer in every]
                if not _has_mean(values[0], key, group["params"][place]):
                    _take_over(given, key, values[0])
                elif len(values) == len(sound):
                    for row, value in zip(members, values, strict=True):
                        row.append(value)
                    for row, state in zip(targets, given, strict=True):
                        row.append(state[key])
                else:
                    of_holders = None if weights is None else list(compress(weights, holders))
                    tensors.mean_([[value] for value in values], [[state[key]] for state in given], of_holders)
    tensors.mean_(members, targets, weights)
    _average_groups(sound, every, [1.0] * len(sound) if weights is None else weights)


def _average_groups(sound: Sequence[Optimizer], every: Sequence[Optimizer], weights: Sequence[float]) -> None:
    kept = [kept_in_groups(optimizer) for optimizer in sound]
    for index, key in dict.fromkeys(chain(*kept)):
        holders = [(index, key) in own for own in kept]  # one that has made no step yet may not count them
        values = [optimizer.param_groups[index][key] for optimizer in compress(sound, holders)]
        if any(isinstance(optimizer.param_groups[index].get(key), Tensor) for optimizer in (*sound, *every)):
            continue
        apart = any(value != values[0] for value in values)
        of_holders = list(compress(weights, holders))
        merged = mean_number(values, of_holders) if apart and isinstance(values[0], float) else values[0]
        for optimizer in every:
            optimizer.param_groups[index][key] = merged


def mean_number(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted mean of numbers."""
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _state(optimizer: Optimizer, index: int, place: int) -> dict[str, Any]:
    """The state of one parameter, empty if it has none."""
    state: dict[str, Any] = optimizer.state.get(optimizer.param_groups[index]["params"][place], {})
    return state


def _keep_only(optimizer: Optimizer, index: int, place: int, keys: Container[str]) -> None:
    state = _state(optimizer, index, place)
    # Other objects have no mean, and of copies on a rank the first is not told of all (`distributed.optimizer_mean`).
    others = [key for key, held in state.items() if key not in keys and isinstance(held, (Tensor, float, int, str))]
    for key in others:
        del state[key]
    if others and not state:
        del optimizer.state[optimizer.param_groups[index]["params"][place]]


def _slot(optimizer: Optimizer, index: int, place: int, key: str, like: Any) -> dict[str, Any]:
    """The state of one parameter, with an entry at `key`."""
    parameter = optimizer.param_groups[index]["params"][place]
    state: dict[str, Any] = optimizer.state.setdefault(parameter, {})
    if state.get(key) is None:
        state[key] = copy.deepcopy(like)
    return state


def _take_over(states: Sequence[dict[str, Any]], key: str, value: Any) -> None:
    for state in states:
        if state[key] is value:
            continue
        if isinstance(value, Tensor) and isinstance(state[key], Tensor) and state[key].shape == value.shape:
            tensors.copy_([state[key]], [value])
        else:
            state[key] = copy.deepcopy(value)


def is_of_elements(dimensions: int, key: object, parameter: Tensor | None) -> bool:
    """Whether a tensor of a parameter's state is of its elements, and no number of the whole, such as a step count.

    Of a parameter without dimensions, such as a temperature, all is but `step`.
    """
    return dimensions > 0 or (parameter is not None and parameter.dim() == 0 and key != "step")


def _has_mean(value: object, key: object, parameter: Tensor) -> bool:
    if not isinstance(value, Tensor) or not tensors.is_inexact(value):
        return False
    return value.numel() > 0 and is_of_elements(value.dim(), key, parameter)
