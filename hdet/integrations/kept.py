"""What somebody's own code notes down as it computes a loss, undone where the loss was the probe's."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from hdet.replicas.dense import can_be_written

PLAIN = (dict, defaultdict, OrderedDict, Counter, list, deque, set, int, float, bool, Tensor)
LARGEST = 10_000
"""Entries of a container, or of a tensor, that may be notes; a larger one is data."""
DEEPEST = 3
"""Dicts in dicts that are looked into."""


@contextmanager
def values_kept(owner: object, *, private: bool) -> Iterator[None]:
    """Containers, numbers and tensors of an object hold after the block what they held before, and those in its dicts.

    Args:
        private: those whose names begin with `_`, too.
    """
    own = vars(owner)
    held = {
        name: (value, _copied(value))
        for name, value in own.items()
        if type(value) in PLAIN and (private or not name.startswith("_"))
    }
    try:
        yield
    finally:
        for name, (value, before) in held.items():
            _put_back(value, before)
            own[name] = value


def _copied(value: Any, depth: int = 0) -> Any:
    """What a container holds, of a dict each entry with what that holds; None of what is no container, or too large."""
    if type(value) not in PLAIN or isinstance(value, (int, float)):
        return None
    if isinstance(value, Tensor):
        writes = not value.requires_grad and can_be_written(value)
        return (value._version, value.clone()) if writes and value.numel() <= LARGEST else None
    if len(value) > LARGEST:
        return None
    if isinstance(value, dict):
        return {key: (own, _copied(own, depth + 1) if depth < DEEPEST else None) for key, own in value.items()}
    return value.copy()


def _put_back(value: Any, before: Any) -> None:
    if before is None:
        return
    if isinstance(value, Tensor):
        version, held = before
        if value._version != version:  # else a graph may need it as it is
            value.detach().copy_(held)
        return
    value.clear()
    if isinstance(value, dict):
        for key, (own, known) in before.items():
            _put_back(own, known)
            value[key] = own
    elif isinstance(value, set):
        value.update(before)
    else:
        value.extend(before)
