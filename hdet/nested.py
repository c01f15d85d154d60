"""Nested mappings, lists and tuples: what states, records and declarations are made of."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of nested mappings, lists and tuples, every value in them changed.

    A named tuple stays one, and so does a subclass of `dict`, with its attributes. Any other subclass of `tuple`, such
    as `torch.Size`, is a value; any other mapping becomes a `dict`.

    >>> mapped({"a": [1.5, 2.5], "b": 3}, int)
    {'a': [1, 2], 'b': 3}
    """
    if isinstance(value, Mapping):
        changed = {key: mapped(item, change) for key, item in value.items()}
        if type(value) is dict or not isinstance(value, dict):
            return changed
        kept = copy.copy(value)
        dict.update(kept, changed)  # a Counter's own would add
        return kept
    if isinstance(value, list):
        return [mapped(item, change) for item in value]
    if hasattr(value, "_fields") and isinstance(value, tuple):
        return type(value)(*(mapped(item, change) for item in value))
    if type(value) is tuple:
        return tuple(mapped(item, change) for item in value)
    return change(value)


def flat(value: Any, separator: str, path: str = "") -> dict[str, Any]:
    """The values in nested mappings, lists and tuples, by their path.

    >>> flat({"a": [1.5, 2.5], "b": {"c": 3}}, ".")
    {'a.0': 1.5, 'a.1': 2.5, 'b.c': 3}
    """
    if not isinstance(value, (Mapping, list, tuple)):
        return {path: value}
    found: dict[str, Any] = {}
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        found.update(flat(item, separator, f"{path}{separator}{key}" if path else str(key)))
    return found
