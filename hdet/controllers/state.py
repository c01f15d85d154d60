"""Controller and estimator state as plain numbers, so that a checkpoint holds nothing else.

A state is a frozen dataclass whose fields are `float`, `int`, `bool`, tuples of floats or float64 arrays. It never
depends on the number of replicas, so a run may resume with another N.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, get_origin, get_type_hints

import numpy as np

from hdet.errors import CheckpointError

T = TypeVar("T")


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
        plain[field.name] = np.asarray(value).tolist() if isinstance(value, (np.ndarray, tuple)) else value
    return plain


def from_plain(cls: type[T], plain: Mapping[str, Any]) -> T:
    """The state that `to_plain` wrote: equal in every bit.

    Raises:
        CheckpointError: the fields are not those of `cls`.
    """
    hints = get_type_hints(cls)
    if set(plain) != set(hints):
        raise CheckpointError(
            f"{cls.__name__} has the fields {sorted(hints)}, the checkpoint {sorted(plain)}; "
            "resume with the controller or estimator (and the version of hdet) that wrote it, or start it anew"
        )
    return cls(**{name: _typed(hint, plain[name]) for name, hint in hints.items()})


def _typed(hint: Any, value: Any) -> Any:
    if get_origin(hint) is np.ndarray:
        return np.array(value, dtype=np.float64)
    if get_origin(hint) is tuple:
        return tuple(map(float, value))
    return hint(value)
