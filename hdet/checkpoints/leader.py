"""What one rank of a group does for all of them, and what they share out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist

from hdet.errors import CheckpointError, HdetError
from hdet.replicas.distributed.lost_rank import translated

T = TypeVar("T")

Outcome = tuple[T | None, HdetError | None]
"""What a call returned, or the error that it raised."""


def leads(group: dist.ProcessGroup | None) -> bool:
    """Whether this process is the group's first; without a group it is alone."""
    return group is None or dist.get_rank(group) == 0


def led(group: dist.ProcessGroup | None, act: Callable[[], T]) -> T:
    """What `act()` returns on the group's first rank, which alone calls it, on every rank.

    Raises:
        HdetError: the first rank's, on every rank, so that none waits for one that has gone; an OSError as a
            CheckpointError.
        LostRankError: another rank is gone.
    """
    return broadcast(group, attempted(act) if leads(group) else None)


def broadcast(group: dist.ProcessGroup | None, outcome: Outcome[T] | None) -> T:
    """The value of the first rank's outcome on every rank, or its error raised there.

    Args:
        outcome: on the group's first rank what `attempted` returned; the others' is not looked at.
    """
    outcomes = [outcome]
    if group is not None:
        with translated("hearing of the leading rank"):
            dist.broadcast_object_list(outcomes, src=dist.get_global_rank(group, 0), group=group)
    assert outcomes[0] is not None
    value, error = outcomes[0]
    if error is not None:
        raise error
    return cast("T", value)


def shared_out(group: dist.ProcessGroup | None, names: Sequence[str], act: Callable[[str], T]) -> Mapping[str, T]:
    """`act(name)` by name, each name by one of the ranks; the result on every rank.

    Raises:
        HdetError: that of the first rank that raised, on every rank; an OSError as one too.
        LostRankError: another rank is gone.
    """
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    own = attempted(lambda: {name: act(name) for name in names[rank::size]})
    everyone: list[Any] = [own]
    if group is not None:
        everyone = [None] * size
        with translated("hearing of the other ranks"):
            dist.all_gather_object(everyone, own, group=group)
    for _, error in everyone:
        if error is not None:
            raise error
    return {name: value for found, _ in everyone for name, value in found.items()}


def attempted(act: Callable[[], T], file_error: type[HdetError] = CheckpointError) -> Outcome[T]:
    """What came of `act()`; an OSError becomes a `file_error`, so that all ranks can be given it."""
    try:
        return act(), None
    except HdetError as error:
        return None, error
    except OSError as error:
        return None, file_error(f"a file of the run could not be read or written: {error}")
