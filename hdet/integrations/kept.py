"""What somebody's own code notes down as it computes a loss, undone where the loss was the probe's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PLAIN = (list, dict, set, int, float)


@contextmanager
def values_kept(owner: object, *, private: bool) -> Iterator[None]:
    """Lists, dicts, sets and numbers of an object hold after the block what they held before, and dicts in dicts.

    Args:
        private: those whose names begin with `_`, too.
    """
    held = {
        name: (value, _copied(value))
        for name, value in vars(owner).items()
        if isinstance(value, PLAIN) and (private or not name.startswith("_"))
    }
    try:
        yield
    finally:
        for name, (value, before) in held.items():
            _put_back(value, before)
            setattr(owner, name, value)


def _copied(value: Any) -> Any:
    """A copy of a container; of a dict each value with its own."""
    if isinstance(value, dict):
        return {key: (own, _copied(own)) for key, own in value.items()}
    return copy.copy(value) if isinstance(value, (list, set)) else None


def _put_back(value: Any, before: Any) -> None:
    if isinstance(value, list):
        value[:] = before
    elif isinstance(value, set):
        value.clear()
        value.update(before)
    elif isinstance(value, dict):
        value.clear()
        for key, (own, known) in before.items():
            _put_back(own, known)
            value[key] = own
