"""What `fully_shard` does over which ranks, from its private groups of parameters where they are as expected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any

from torch import nn

from hdet.replicas import walk

COMMON = "torch.distributed.fsdp._fully_shard._fsdp_common"
FIELDS = ("mesh_info", "post_forward_mesh_info")
FLAGS = ("reduce_grads", "all_reduce_grads")


def over(model: nn.Module, parts: int) -> bool:
    """Whether a replica's parts are shards only, each rank of which trains on data of its own."""
    sizes = {getattr(group.mesh_info, "shard_mesh_size", 1) for group in _groups(model)}
    return parts > 1 and sizes == {parts}


def without_all_reduce(model: nn.Module) -> Callable[[], AbstractContextManager[None]] | None:
    """Makes the context in which HSDP averages gradients over a replica's shards, and not over replicas.

    `set_requires_all_reduce(False)` leaves no gradients at all. Inside the block each group of parameters is told the
    sharded dimension of its mesh alone, as `fully_shard(model, mesh=mesh["dp_shard"])` would have. `None` where this
    version of torch keeps the mesh elsewhere.
    """
    groups = _groups(model)
    try:
        common = import_module(COMMON)
        native = [group.mesh_info for group in groups]
        alone = [common.FSDPMeshInfo(info.mesh, info.shard_mesh_dim) for info in native]
        reduced = bool(groups) and all(isinstance(info, common.HSDPMeshInfo) for info in native)
    except (ImportError, AttributeError, TypeError):
        return None

    @contextmanager
    def context() -> Iterator[None]:
        _replace(groups, native, alone)
        try:
            yield
        finally:
            _replace(groups, alone, native)

    return context if reduced else None


def used(model: nn.Module) -> bool:
    """Whether `fully_shard` was called on any part of the model."""
    return bool(walk.fully_sharded(model.modules()))


@contextmanager
def reducing(model: nn.Module) -> Iterator[None]:
    """Every backward in the block reduces gradients, whatever `set_requires_gradient_sync` was last told."""
    groups = _groups(model)
    before = [{flag: getattr(group, flag) for flag in FLAGS if hasattr(group, flag)} for group in groups]
    try:
        for group, flags in zip(groups, before, strict=True):
            for flag in flags:
                setattr(group, flag, True)
        yield
    finally:
        for group, flags in zip(groups, before, strict=True):
            for flag, value in flags.items():
                setattr(group, flag, value)


def _replace(groups: Sequence[Any], before: Sequence[Any], after: Sequence[Any]) -> None:
    for group, old, new in zip(groups, before, after, strict=True):
        for field in FIELDS:  # the second is the first, something else, or (since the first forward) nothing
            if getattr(group, field) is old:
                setattr(group, field, new)


def _groups(model: nn.Module) -> list[Any]:
    states = [module._get_fsdp_state() for module in walk.fully_sharded(model.modules())]
    groups = [group for state in states for group in _of(state)]
    return [group for group in groups if all(hasattr(group, field) for field in FIELDS)]


def _of(state: Any) -> Sequence[Any]:
    """In torch 2.11 a state has one group, or none."""
    return getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
