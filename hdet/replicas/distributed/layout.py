"""Which rank holds which replica: read from a process group or a device mesh."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from hdet.errors import ConfigError, StepError

REPLICATE_NAMES = ("dp_replicate", "replicate", "dp")


class Group:
    """A process group, held weakly: `destroy_process_group` can then end its threads.

    Held strongly by an engine it would outlive its destruction, and a thread of gloo that needs the interpreter while
    that shuts down aborts the process ("terminate called without an active exception").
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._held = weakref.ref(group)

    def __call__(self) -> dist.ProcessGroup:
        group = self._held()
        if group is None:
            raise StepError("the process group has been destroyed; train inside its block, or before destroying it")
        return group


@dataclass(frozen=True)
class Layout:
    """The ranks of a run as a table: one row a replica's place, one column a part of the replica.

    Attributes:
        everyone: the group of all ranks of the run.
        peers: the group of the ranks that hold this rank's part, one at each place; replicas merge over it.
        table: [places, parts] ranks within `everyone`. Data parallelism has one part.
        place, part: this rank's row and column.
        global_peers: the global ranks of `peers`, in the order of the places.
    """

    everyone: Group
    peers: Group
    table: NDArray[np.int64]
    place: int
    part: int
    global_peers: tuple[int, ...]

    @property
    def places(self) -> int:
        return int(self.table.shape[0])

    @property
    def parts(self) -> int:
        return int(self.table.shape[1])

    def ranks_of_peers(self) -> list[int]:
        """The rank within `peers` of each place. Torch sorts a group's ranks, whatever the order of the mesh."""
        return [dist.get_group_rank(self.peers(), rank) for rank in self.global_peers]

    def group_of_place(self) -> dist.ProcessGroup:
        """A new group of the ranks that hold this replica; these alone take part in making it."""
        ranks = dist.get_process_group_ranks(self.everyone())
        return _group_of([ranks[own] for own in self.table[self.place]])


def of_group(group: dist.ProcessGroup | None) -> Layout:
    """Every rank of a group (by default of all ranks) holds replicas of its own."""
    group = group if group is not None else dist.group.WORLD
    assert group is not None
    size = dist.get_world_size(group)
    table = np.arange(size, dtype=np.int64).reshape(size, 1)
    ranks = tuple(dist.get_process_group_ranks(group))
    return Layout(Group(group), Group(group), table, dist.get_rank(group), 0, ranks)


def of_mesh(mesh: DeviceMesh, replicate: str | None) -> Layout:
    """Replicas lie along one dimension of the mesh; the ranks along the others share a replica.

    Args:
        mesh: any number of dimensions.
        replicate: the name of the dimension along which replicas lie; by default `dp_replicate`, `replicate` or
            `dp`, whichever there is, and the only dimension of a one-dimensional mesh.

    Raises:
        ConfigError: there is no such dimension.
    """
    dimension = _dimension(mesh, replicate)
    ranks = np.asarray(mesh.mesh.cpu().numpy(), dtype=np.int64)
    rows = np.moveaxis(ranks, dimension, 0).reshape(ranks.shape[dimension], -1)
    members = rows.flatten().tolist()
    everyone = _group_of(members)
    within = {rank: dist.get_group_rank(everyone, rank) for rank in members}
    table = np.vectorize(within.__getitem__, otypes=[np.int64])(rows)
    peers = mesh.get_group(dimension)
    place, part = (int(axis[0]) for axis in np.nonzero(rows == dist.get_rank()))
    return Layout(Group(everyone), Group(peers), table, place, part, tuple(rows[:, part].tolist()))


def _dimension(mesh: DeviceMesh, replicate: str | None) -> int:
    names: Sequence[str] = mesh.mesh_dim_names or ()
    if replicate is None:
        if mesh.ndim == 1:
            return 0
        known = [name for name in REPLICATE_NAMES if name in names]
        if known:
            return names.index(known[0])
    elif replicate in names:
        return names.index(replicate)
    raise ConfigError(
        f"the mesh of shape {tuple(mesh.shape)} has the dimensions {list(names) or 'without names'}, and none is "
        + (f"called {replicate!r}" if replicate else f"called one of {list(REPLICATE_NAMES)}")
        + "; name its dimensions by mesh_dim_names= and say replicate=, the one along which replicas lie"
    )


def _group_of(ranks: list[int]) -> dist.ProcessGroup:
    if len(ranks) == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    # The ranks outside this mesh (another pipeline stage's, say) need not take part in making the group.
    group = dist.new_group(sorted(ranks), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group
