"""What one rank of a group does for all of them, and what they share out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from hdet.errors import CheckpointError, HdetError

T = TypeVar("T")


def leads(group: dist.ProcessGroup | None) -> bool:
    """Whether this process is the group's first; without a group it is alone."""
    return group is None or dist.get_rank(group) == 0


def led(group: dist.ProcessGroup | None, act: Callable[[], T]) -> T:
    """What `act()` returns on the group's first rank, which alone calls it, on every rank.

    Raises:
        HdetError: the first rank's, on every rank, so that none waits for one that has gone; an OSError as one too.
    """
    found: list[Any] = list(_tried(act)) if leads(group) else [None, None]
    if group is not None:
        dist.broadcast_object_list(found, src=dist.get_global_rank(group, 0), group=group)
    if found[1] is not None:
        raise found[1]
    value: T = found[0]
    return value


def shared_out(group: dist.ProcessGroup | None, names: Sequence[str], act: Callable[[str], T]) -> Mapping[str, T]:
    """`act(name)` by name, each name by one of the ranks; the result on every rank.

    Raises:
        HdetError: that of the first rank that raised, on every rank; an OSError as one too.
    """
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    own = _tried(lambda: {name: act(name) for name in names[rank::size]})
    everyone: list[Any] = [own]
    if group is not None:
        everyone = [None] * size
        dist.all_gather_object(everyone, own, group=group)
    for _, error in everyone:
        if error is not None:
            raise error
    return {name: value for found, _ in everyone for name, value in found.items()}


def _tried(act: Callable[[], T]) -> tuple[T | None, HdetError | None]:
    try:
        return act(), None
    except HdetError as error:
        return None, error
    except OSError as error:
        return None, CheckpointError(f"a file of the run could not be read or written: {error}")
