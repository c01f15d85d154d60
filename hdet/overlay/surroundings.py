"""Where replicas live: found from what wraps the model and how it is sharded, or from what a scheduler was given."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from hdet.errors import ConfigError
from hdet.replicas import Replicas, micro_batches, replicate
from hdet.replicas.distributed import distribute, refusals
from hdet.replicas.parallel import unwrapped, world


def home(model: nn.Module, optimizer: Optimizer, seats: int) -> Replicas:
    """The micro-batches of this process, and of the others that train the same model.

    | the model is | replicas lie |
    |---|---|
    | plain, in one process | here |
    | in DistributedDataParallel | on the ranks of its group |
    | sharded (FSDP2, tensor parallel, both) | along the dimensions of the mesh over which nothing is sharded |
    | sharded over all ranks | here: all ranks together hold one |

    Args:
        seats: passes of this process to an optimizer step.

    Raises:
        ConfigError: there are other processes, and nothing says how they train together.
    """
    if type(model).__module__.startswith("torchft."):
        raise ConfigError(
            "the model is in torchft's DistributedDataParallel, and other replica groups would not follow what this "
            "one learns; call hdet.torchft.attach(manager, model, optimizer, probe=...)"
        )
    bare, wrapper = unwrapped(model)
    if type(bare).__module__ in ("lightning.fabric.wrappers", "lightning_fabric.wrappers"):
        raise ConfigError(
            "the model is wrapped by Lightning Fabric, in whose precision the probe would not be judged; call "
            "hdet.fabric.attach(fabric, model, optimizer, probe=...)"
        )
    if world() == 1:
        return micro_batches(bare, optimizer, seats)
    refusals.pipelined(model, None)
    meshes = [mesh for p in bare.parameters() if (mesh := getattr(p, "device_mesh", None)) is not None]
    if meshes:
        mesh, dimension = replicated(bare, max(meshes, key=lambda mesh: mesh.ndim))
        return distribute(model, optimizer, mesh=mesh, replicate=dimension, micro_batches=seats)
    if wrapper is not None:
        return distribute(model, optimizer, group=wrapper.process_group, micro_batches=seats, send=False)
    refusals.partitioned(model, optimizer)
    raise ConfigError(
        f"this is one of {world()} processes, and the model is neither in DistributedDataParallel nor sharded over "
        f"them: nothing tells whether they train one model or several; wrap it first, and give hdet.attach the "
        f"wrapped model, or, if your loop shares gradients itself, give replicas=hdet.distribute(model, optimizer, "
        f"micro_batches=...)"
    )


def replicated(model: nn.Module, mesh: DeviceMesh) -> tuple[DeviceMesh, str]:
    """The whole mesh that a model's parameters lie in, and the name of the dimension over which none is sharded.

    Where every dimension is sharded, a mesh with one more, of size 1.

    Raises:
        ConfigError: several dimensions are not sharded.
    """
    root = mesh._get_root_mesh()
    cut = [set(ranks) for p in model.parameters() for ranks, divided in refusals.dimensions(p) if divided]
    along = [set(dist.get_process_group_ranks(root.get_group(number))) for number in range(root.ndim)]
    whole = [number for number, ranks in enumerate(along) if len(ranks) > 1 and not any(ranks <= own for own in cut)]
    if len(whole) > 1:
        raise ConfigError(
            f"the mesh of shape {tuple(root.shape)} has {len(whole)} dimensions over which nothing is sharded, and "
            f"hdet cannot tell along which replicas lie; give replicas=hdet.distribute(model, optimizer, mesh=..., "
            f"replicate=..., micro_batches=...)"
        )
    names = root.mesh_dim_names
    if whole and names is not None:
        return root, names[whole[0]]
    ranks = root.mesh.clone()
    if whole:
        return DeviceMesh(root.device_type, ranks, mesh_dim_names=_numbered(root.ndim, whole[0])), "replicate"
    return DeviceMesh(root.device_type, ranks.unsqueeze(0), mesh_dim_names=_numbered(root.ndim + 1, 0)), "replicate"


def _numbered(dimensions: int, replicate: int) -> tuple[str, ...]:
    return tuple("replicate" if number == replicate else f"part{number}" for number in range(dimensions))


def how_many(model: nn.Module | None, replicas: Replicas | None) -> int:
    """How many replicas `surroundings` would find; it builds nothing, and takes any optimizer.

    Raises:
        ConfigError: both `model` and `replicas` were given.
    """
    if replicas is not None:
        if model is not None:
            raise ConfigError("give model= or replicas=, not both: replicas hold their models")
        return replicas.size
    return world()


def surroundings(optimizer: Optimizer, model: nn.Module | None, replicas: Replicas | None) -> Replicas:
    """The replicas there are: those given, else those of `torch.distributed`, else this process alone.

    Raises:
        ConfigError: a parameter cannot be held by a module.
    """
    if replicas is not None:
        return replicas
    held = model if model is not None else OptimizedParameters(optimizer)
    return replicate(held, optimizer, n=1) if world() == 1 else distribute(held, optimizer)


class OptimizedParameters(nn.Module):
    """An optimizer's parameters in the shape of a module, where the model itself was not given.

    Buffers (BatchNorm's statistics) are not among them and so are not merged; give the model to have them.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        for index, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if not isinstance(parameter, nn.Parameter):
                    raise ConfigError(
                        f"parameter {position} of group {index} is a plain tensor; make it an "
                        f"nn.Parameter, or give the scheduler model= or replicas="
                    )
                self.register_parameter(f"group{index}_{position}", parameter)
