"""What somebody's own code notes down and logs as it computes a loss, undone where the loss was the probe's."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

CONTAINERS = (dict, defaultdict, OrderedDict, Counter, list, deque, set)
PLAIN = (*CONTAINERS, int, float, bool, Tensor)
LARGEST = 10_000
"""Entries of a container, or of a tensor, that may be notes; a larger one is data."""
DEEPEST = 3
"""Dicts in dicts that are looked into."""


@contextmanager
def values_kept(owner: object, *, private: bool) -> Iterator[None]:
    """Containers, numbers and tensors of an object hold after the block what they held before, and those in its dicts.

    What it had none of before is gone again, but for a plain number, which may say what was done once and for all; what
    was None is None.

    Args:
        private: those whose names begin with `_`, too.
    """
    own = vars(owner)

    def noted() -> set[str]:
        return {name for name, value in own.items() if type(value) in PLAIN and (private or not name.startswith("_"))}

    before = dict(own)
    held = _lent(own, noted())
    try:
        yield
    finally:
        _put_back(own, held)
        for name in noted() - held.keys():
            if name not in before and not isinstance(own[name], (int, float)):
                del own[name]
            elif name in before and before[name] is None:
                own[name] = None


def _lent(entries: dict[Any, Any], keys: Iterable[Any], depth: int = 0) -> dict[Any, Any]:
    """Each entry with what it holds. A copy stands in for a tensor: a graph may keep what the block has written."""
    held = {}
    for key in keys:
        value = entries[key]
        held[key] = value, _copied(value, depth)
        if type(value) is Tensor and value.numel() <= LARGEST and not value.requires_grad:
            entries[key] = value.clone()
    return held


def _copied(value: Any, depth: int) -> Any:
    """What a container holds; None of what is no container, too large, or too deep in others."""
    if type(value) not in CONTAINERS or len(value) > LARGEST or depth > DEEPEST:
        return None
    return _lent(value, list(value), depth + 1) if isinstance(value, dict) else value.copy()


def _put_back(entries: dict[Any, Any], held: dict[Any, Any]) -> None:
    for key, (value, before) in held.items():
        if before is not None:
            value.clear()
            if isinstance(value, dict):
                _put_back(value, before)
            elif isinstance(value, set):
                value.update(before)
            else:
                value.extend(before)
        entries[key] = value


def put_in(owner: object, **values: Any) -> Callable[[], None]:
    """Put functions in the place of an object's methods, or other values of attributes; return what undoes it."""
    own = vars(owner)
    before = {name: own[name] for name in values if name in own}
    own.update(values)

    def undo() -> None:
        for name in values:
            own.pop(name, None)
        own.update(before)

    return undo


@contextmanager
def standing_in(owner: object, **values: Any) -> Iterator[None]:
    """The same within the block."""
    undo = put_in(owner, **values)
    try:
        yield
    finally:
        undo()
