"""Where a signal has its batches from: a list, a DataLoader, or a function of the window's number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from hdet.errors import ConfigError, StepError
from hdet.replicas.generators import numbers_lent
from hdet.replicas.random_numbers import accelerators_in_use

MOST = 1000
"""Batches of a window, from which what does not know its own length is taken for endless."""


def require_batches(batches: object, whose: str) -> None:
    """Refuse what cannot be gone through in every window."""
    if isinstance(batches, Iterator):
        raise ConfigError(
            f"{whose} batches are gone through in every window, and a {type(batches).__name__} only once; "
            f"give a list of them, or a function from the window's number to them"
        )
    if not (callable(batches) or hasattr(batches, "__len__")) or isinstance(batches, (str, Mapping)):
        raise ConfigError(
            f"batches is a list, a DataLoader or a function from the window's number to batches, got "
            f"{type(batches).__name__}; what can only be iterated goes into a DataLoader"
        )


def number_of(batches: Any) -> int | None:
    """How many there are; None where nobody knows: of a function, and of a loader of a stream or without a length."""
    return len(batches) if not callable(batches) and not _streams(batches) and _has_length(batches) else None


def shown(signal: object, loss: object, batches: Any, told: str = "") -> str:
    """A signal in short: batches are tensors, of which a notebook would print pages."""
    number = number_of(batches)
    source = getattr(batches, "__name__", type(batches).__name__)
    name = getattr(loss, "__name__", type(loss).__name__)
    return f"<{type(signal).__name__} of {name} over {source if number is None else f'{number} batches'}{told}>"


def _has_length(batches: Any) -> bool:
    """Whether something knows that they end. Every DataLoader has a length, which its stream or sampler may refuse."""
    own = batches
    if _streams(batches):
        own = batches.dataset
    elif isinstance(batches, DataLoader):
        own = batches.sampler if batches.batch_sampler is None else batches.batch_sampler
        if isinstance(own, BatchSampler) and type(own).__len__ is BatchSampler.__len__:  # asks the sampler it has
            own = own.sampler
    return hasattr(own, "__len__")


def _streams(batches: object) -> bool:
    return isinstance(batches, DataLoader) and isinstance(batches.dataset, IterableDataset)


def drawn_batches(batches: Iterable[Any] | Callable[[int], Iterable[Any]], window: int, numbers: str) -> list[Any]:
    """The batches of a window, by random numbers of their own, which `numbers` names; training's are left.

    Raises:
        StepError: a stream, or what a function returned, goes on after `MOST` batches.
    """
    if isinstance(batches, (list, tuple)):  # which draw nothing
        return list(batches)
    # A function with a generator of its own goes on with it, to have others in the next window.
    held = () if callable(batches) else batches
    with numbers_lent(numbers, accelerators_in_use(), held):
        given = batches(window) if callable(batches) else batches
        if _has_length(given):
            return list(given)
        drawn = list(islice(given, MOST + 1))
    if len(drawn) > MOST:
        raise StepError(
            f"a {type(given).__name__} gave more than {MOST} batches for one window, all of which would be evaluated, "
            f"and may have no end: give a part of it, as list(itertools.islice(loader, 8))"
        )
    return drawn
