"""The generators of random numbers that batches and models draw from, beside torch's default ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from hdet.replicas.random_numbers import seeded

PARTS = ("sampler", "batch_sampler", "dataset")
"""Attributes of a loader, of its samplers and of its data set, that may hold generators in turn."""

KINDS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)


@contextmanager
def generators_kept(*holders: object) -> Iterator[list[Any]]:
    """Generators are after the block as they were before it, so that the next one draws the same numbers.

    These are Python's and NumPy's global ones, and those that modules, a DataLoader, its samplers and its data sets
    hold as attributes; it gives the latter. A generator that is held elsewhere, or by a worker process, is not seen.

    >>> with generators_kept([]):
    ...     first = random.random()
    >>> random.random() == first
    True
    """
    held = _held(holders)
    restores: list[Callable[[], object]] = [
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),
        *map(_restore, held),
    ]
    try:
        yield held
    finally:
        for restore in restores:
            restore()


@contextmanager
def numbers_lent(text: str, devices: Iterable[torch.device] = (), *holders: object) -> Iterator[None]:
    """The global generators, of the CPU and of some devices, are seeded by a text inside the block only.

    So are those that batches or modules hold.
    """
    with seeded(devices, text), generators_kept(*holders) as held:
        for number, own in enumerate(held):
            _seed(own, f"{text}:{number}")
        random.seed(text)
        np.random.seed(random.getrandbits(32))
        yield


def _held(holders: Iterable[object]) -> list[Any]:
    """The generators that these and their parts hold as attributes, each and each part once."""
    seen: set[int] = set()
    held: dict[int, Any] = {}
    parts = list(holders)
    for part in parts:  # which grows as it is gone through
        if id(part) not in seen:
            seen.add(id(part))
            attributes = getattr(part, "__dict__", {})
            held.update((id(own), own) for own in attributes.values() if _is_generator(own))
            parts += [attributes[name] for name in PARTS if name in attributes]
    return list(held.values())


def _is_generator(own: object) -> bool:
    """Whether it is one that can be seeded. (By its type: what an attribute stands for may be gone.)"""
    return issubclass(type(own), KINDS) and not isinstance(own, random.SystemRandom)


def _seed(held: Any, text: str) -> None:
    """Seed a generator by a text."""
    number = random.Random(text).getrandbits(32)
    if isinstance(held, torch.Generator):
        held.manual_seed(number)
    elif isinstance(held, random.Random):
        held.seed(number)
    elif isinstance(held, np.random.RandomState):
        kind = held.get_state(legacy=False)["bit_generator"]
        held.set_state(np.random.RandomState(getattr(np.random, kind)(number)).get_state(legacy=False))
    else:
        held.bit_generator.state = type(held.bit_generator)(number).state


def _restore(held: Any) -> Callable[[], object]:
    """How a generator gets the state back that it has now."""
    if isinstance(held, torch.Generator):
        return partial(held.set_state, held.get_state())
    if isinstance(held, random.Random):
        return partial(held.setstate, held.getstate())
    if isinstance(held, np.random.RandomState):
        return partial(held.set_state, held.get_state(legacy=False))
    return partial(setattr, held.bit_generator, "state", held.bit_generator.state)
