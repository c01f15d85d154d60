"""Controller and estimator state as plain numbers, so that a checkpoint holds nothing else.

A state is a frozen dataclass whose fields are `float`, `int`, `bool`, tuples of floats, float64 arrays or mappings from
names to other states. It never depends on the number of replicas, so a run may resume with another N.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, get_origin, get_type_hints

import numpy as np

from hdet.errors import CheckpointError

T = TypeVar("T")

OF_NUMPY = (np.ndarray, np.generic, tuple)
"""What NumPy makes plain numbers of: its own numbers too, which a checkpoint that is read as data cannot hold."""


@dataclass(frozen=True)
class NoState:
    """The state of a rule that remembers nothing."""


def to_plain(state: Any) -> dict[str, Any]:
    """A state as a mapping from field to number or (nested) list of numbers.

    >>> to_plain(NoState())
    {}
    """
    plain: dict[str, Any] = {}
    for field in fields(state):
        value = getattr(state, field.name)
        if isinstance(value, Mapping):
            plain[field.name] = {name: to_plain(part) for name, part in value.items()}
        else:
            plain[field.name] = np.asarray(value).tolist() if isinstance(value, OF_NUMPY) else value
    return plain


def from_plain(like: T, plain: Mapping[str, Any]) -> T:
    """The state that `to_plain` wrote: equal in every bit.

    Args:
        like: a state of the same controller or estimator, such as its first.

    Raises:
        CheckpointError: the fields are not those of `like`, or one holds what it cannot be.
    """
    cls = type(like)
    hints = get_type_hints(cls)
    _require_same_names(cls.__name__, hints, plain)
    found: dict[str, Any] = {}
    for name, hint in hints.items():
        try:
            found[name] = _typed(hint, plain[name], getattr(like, name))
        except (TypeError, ValueError, OverflowError):
            raise CheckpointError(
                f"{cls.__name__}.{name} is {plain[name]!r:.60} in the checkpoint, which is damaged; resume from another"
            ) from None
    return cls(**found)


def _require_same_names(owner: str, wanted: Iterable[str], plain: Iterable[str]) -> None:
    if set(plain) != set(wanted):
        raise CheckpointError(
            f"{owner} has the fields {sorted(wanted)}, the checkpoint {sorted(plain)}; "
            "resume with the controller or estimator (and the version of hdet) that wrote it, or start it anew"
        )


def _typed(hint: Any, value: Any, like: Any) -> Any:
    if np.ndarray in (hint, get_origin(hint)):
        return np.array(value, dtype=np.float64)
    if get_origin(hint) is tuple:
        return tuple(map(float, value))
    if isinstance(like, Mapping):
        _require_same_names("the controller", like, value)
        return {name: from_plain(part, value[name]) for name, part in like.items()}
    return hint(value)
