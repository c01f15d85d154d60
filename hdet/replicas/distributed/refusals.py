"""What cannot be distributed: found before anything runs, and said with the way out."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hdet.errors import ConfigError, StepError
from hdet.hparams.param_groups import parameters_of
from hdet.replicas.dense import can_be_written
from hdet.replicas.distributed import fully_sharded
from hdet.replicas.distributed.layout import Layout
from hdet.replicas.parallel import require_whole, unwrapped
from hdet.replicas.tensors import local


def partitioned(model: nn.Module, optimizer: Optimizer) -> None:
    """An optimizer whose state is cut up over ranks applies each rank's knobs to a slice of the model."""
    require_whole(optimizer)
    stage = getattr(model, "zero_optimization_stage", None)
    if callable(stage) and stage() > 0:
        raise ConfigError(
            f"this DeepSpeed engine runs ZeRO stage {stage()}, which partitions the optimizer over ranks; give it to "
            f"hdet.deepspeed.attach, where nothing diverges, use stage 0, or shard by fully_shard over a mesh with a "
            f"replicate dimension"
        )
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ConfigError(
                "the model is wrapped in FullyShardedDataParallel (FSDP1), whose flat parameters cannot be merged "
                "replica by replica; use torch.distributed.fsdp.fully_shard over a mesh with a replicate dimension"
            )


PIPELINES = {"_PipelineStageBase", "_PipelineSchedule"}
PIPELINE_DIMENSIONS = {"pp", "pipe", "pipeline"}


def pipelined(model: Any, mesh: DeviceMesh | None) -> None:
    """The stages of a pipeline hold different parameters, and the last one alone has a loss."""
    names = mesh.mesh_dim_names if mesh is not None else None
    dimensions = [name for name in names or () if name in PIPELINE_DIMENSIONS]
    what = f"the mesh has a dimension {dimensions[0]!r}" if dimensions else ""
    if any(kind.__name__ in PIPELINES for kind in type(model).__mro__):
        what = f"{type(model).__name__} is one"
    elif not dimensions and (stage := _stage_of(model)) is not None:
        what = f"the model is stage {stage.stage_index} of {stage.num_stages}"
    if what:
        raise ConfigError(
            f"hdet does not explore pipelines of stages on several ranks ({what}): a stage holds other parameters than "
            f"its replica's other stages, and the last one alone has a loss to judge by; shard by fully_shard or "
            f"tensor parallelism instead, beside a replicate dimension"
        )


def _stage_of(model: Any) -> Any:
    """The `PipelineStage` of this process that runs a module, wrapped or not; None where there is none.

    A stage holds its module and not the other way round, so it is looked for among all that lives. That is done once,
    when replicas are made, and only in a process that has loaded torch's pipelines.
    """
    stages = sys.modules.get("torch.distributed.pipelining.stage")
    if stages is None:
        return None
    held = [own for own in gc.get_objects() if issubclass(type(own), stages._PipelineStageBase)]
    parts = ((stage, getattr(stage, "submod", None)) for stage in held)
    own, _ = unwrapped(model)
    return next((stage for stage, part in parts if isinstance(part, nn.Module) and unwrapped(part)[0] is own), None)


def outside(group: object) -> None:
    """`torch.distributed.new_group` gives ranks that are not in the group a number in its place."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"rank {dist.get_rank()} is not in the group it was given ({group!r}); call hdet.distribute on the ranks "
            f"of the group only"
        )


def shared_replica(model: nn.Module, layout: Layout) -> None:
    """Ranks that are to be different replicas must not hold parts of one and the same."""
    peers = set(layout.global_peers)
    for name, parameter in model.named_parameters():
        for ranks, sharded in dimensions(parameter):
            across = sorted(peers & set(ranks))
            if sharded and len(across) > 1:
                raise ConfigError(
                    f"{name} is sharded over the ranks {sorted(ranks)}, so the ranks {across} share one replica and "
                    f"cannot hold different values of a knob; give hdet.distribute mesh= with a replicate dimension "
                    f"beside the sharded one, and shard over the latter only"
                )


def shards_of_other_ranks(model: nn.Module, layout: Layout) -> None:
    """Ranks that replicas meet over must hold the same shard, and `fully_shard` deals shards by rank alone."""
    orders = np.argsort(layout.table, axis=1)
    if fully_sharded.used(model) and (orders != orders[0]).any():
        raise ConfigError(
            f"fully_shard deals shards in the order of ranks, whatever that of the mesh, and on the mesh of ranks "
            f"{layout.table.tolist()}, a row a replica, ranks of one column would hold different shards; order the "
            f"ranks of each row alike, as torch.distributed.device_mesh.init_device_mesh does"
        )


def reduced_by_sharding(model: nn.Module, layout: Layout) -> bool:
    """Whether fully sharded training all-reduces gradients over the peers itself (HSDP).

    Raises:
        ConfigError: it does so over other ranks than the replicas'.
    """
    own = {dist.get_global_rank(layout.everyone(), int(rank)) for rank in layout.table[layout.place]}
    for name, parameter in model.named_parameters():
        # A dimension within one replica (sequence parallel norms are whole on every rank of it) is no matter here.
        replicated = [ranks for ranks, sharded in dimensions(parameter) if not sharded and not set(ranks) <= own]
        if replicated and fully_sharded.used(model):
            if any(set(ranks) != set(layout.global_peers) for ranks in replicated):
                raise ConfigError(
                    f"{name} is replicated over the ranks {replicated}, and hdet was told that the replicas of this "
                    f"rank's part lie on {list(layout.global_peers)}; give both the same mesh"
                )
            return True
    return False


def other_group(model: DistributedDataParallel, layout: Layout) -> None:
    """Data parallelism must average over exactly the ranks that are replicas."""
    ranks = tuple(dist.get_process_group_ranks(model.process_group))
    if set(ranks) != set(layout.global_peers):
        raise ConfigError(
            f"DistributedDataParallel averages gradients over the ranks {list(ranks)}, and the replicas lie on "
            f"{list(layout.global_peers)}; give both the same process group"
        )


def joined(model: object) -> None:
    """Ranks of different numbers of steps: those that are done follow data parallelism's collectives, and no others.

    Raises:
        StepError: the model runs under `DistributedDataParallel.join()`.
    """
    if isinstance(model, DistributedDataParallel) and model._join_config.enable:
        raise StepError(
            "DistributedDataParallel.join() lets ranks make different numbers of steps, and hdet's ranks meet at "
            "each window's end, where one would wait for ever; give all ranks as many batches, as "
            "DistributedSampler does, and leave join() out"
        )


def localized(model: nn.Module, optimizer: Optimizer) -> None:
    """Over tensor parallelism DistributedDataParallel marks what it takes off its modules by how it is sharded."""
    every = chain(model.parameters(), parameters_of(optimizer))  # after a pass the model holds them no more
    if any(hasattr(parameter, "_st_info") for parameter in every):
        raise ConfigError(
            "DistributedDataParallel over tensor parallelism (device_mesh=, replicate) takes the parameters off their "
            "modules in every forward pass, so that none are left to look at; use fully_shard over the mesh's other "
            "dimension in its place, before the optimizer is made"
        )


def never_sent(model: nn.Module) -> None:
    """A parameter that cannot be written over would be another on each rank."""
    for name, parameter in model.named_parameters():
        if not can_be_written(local(parameter.detach())):
            raise ConfigError(
                f"the parameter {name} cannot be made the first rank's: it is sparse, expanded, lazily conjugated, "
                f"made under torch.inference_mode() or on the device meta, where values cannot be written over; make "
                f"it dense (.to_dense(), .contiguous(), .resolve_conj(), .clone(), or its values before they are "
                f"sent), or a buffer, which stays each rank's own"
            )


def sharded(model: nn.Module) -> bool:
    """Whether a replica's parameters lie on several ranks."""
    return any(
        divided and len(ranks) > 1 for parameter in model.parameters() for ranks, divided in dimensions(parameter)
    )


def dimensions(parameter: Tensor) -> Iterator[tuple[list[int], bool]]:
    """For each dimension of a sharded parameter's mesh: the global ranks along it, and whether it is cut there."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return
    for dimension, placement in enumerate(parameter.placements):  # type: ignore[attr-defined]
        yield dist.get_process_group_ranks(mesh.get_group(dimension)), not placement.is_replicate()
