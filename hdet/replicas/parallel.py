"""Whether there are other processes, and whether a model is trained together with them."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hdet.errors import ConfigError
from hdet.replicas.chained_optimizer import chained

PARTITIONED = {
    "ZeroRedundancyOptimizer",
    "DeepSpeedZeroOptimizer",
    "DeepSpeedZeroOptimizer_Stage3",
    "DistributedFusedAdam",
    "DistributedFusedLAMB",
    "DistributedOptimizer",
}


def world() -> int:
    """How many processes there are; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def unwrapped(model: nn.Module) -> tuple[nn.Module, DistributedDataParallel | None]:
    """The user's own module below torch.compile and DistributedDataParallel, and the latter if there is one."""
    wrapper = None
    while True:
        if isinstance(model, DistributedDataParallel):
            wrapper = model
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model, wrapper


def require_alone(model: nn.Module, made_by: str) -> None:
    """A model that other ranks train too is explored by one engine, of which each rank has a part.

    Args:
        made_by: the call that would make an engine on this rank alone.

    Raises:
        ConfigError: it is such a model.
    """
    shared = _shared(model)
    if shared is not None:
        raise ConfigError(
            f"{shared}, and {made_by} makes replicas for this process alone: the engines of the ranks would explore "
            f"apart, each by its own estimates, and ranks that hold one model would write different values; make them "
            f"by hdet.distribute(model, optimizer), and give these where there is an argument replicas="
        )


def require_whole(optimizer: Optimizer) -> None:
    """An optimizer that is cut up over ranks keeps its state elsewhere, in one process too.

    Raises:
        ConfigError: it is such an optimizer.
    """
    for kind in (kind for each in chained(optimizer) for kind in type(each).__mro__):
        if kind.__name__ in PARTITIONED:
            raise ConfigError(
                f"{kind.__name__} partitions the optimizer over ranks (ZeRO), so a rank's learning rate "
                f"would act on a slice of the model and not on a replica, and what it remembers, on one rank too, is "
                f"not where hdet could save it or put it back; use a plain optimizer with DistributedDataParallel, or "
                f"shard by fully_shard over a mesh with a replicate dimension"
            )


def _shared(model: nn.Module) -> str | None:
    """What the model shares with other ranks, in words."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            ranks = dist.get_world_size(module.process_group)
            if ranks > 1:
                return f"DistributedDataParallel averages the model's gradients over {ranks} ranks"
        if type(module).__name__ == "FullyShardedDataParallel" and dist.get_world_size() > 1:
            return "FullyShardedDataParallel shards the model over ranks"
    for name, parameter in model.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and mesh.size() > 1:
            return f"{name} lies on a mesh of {mesh.size()} ranks"
    return None
