"""`hdet.distribute`: this rank's replicas, whatever wraps them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hdet.errors import ConfigError
from hdet.replicas import tensors
from hdet.replicas.chained_optimizer import chained
from hdet.replicas.dense import can_be_written
from hdet.replicas.distributed import refusals
from hdet.replicas.distributed.agreement import agree
from hdet.replicas.distributed.exchange import Exchange
from hdet.replicas.distributed.layout import Group, Layout, of_group, of_mesh
from hdet.replicas.distributed.lost_rank import translated
from hdet.replicas.distributed.ranks import Ranks
from hdet.replicas.in_process import check_pair, twin
from hdet.replicas.parallel import unwrapped


def distribute(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    replicate: str | None = None,
    copies: int = 1,
    micro_batches: int | None = None,
    exact: bool = False,
    precision: torch.dtype | None = None,
    overlap: int = 0,
    send: bool = True,
) -> Ranks:
    """The replicas of a distributed run, of which this rank holds one, a part of one, or several.

    | the model is | a replica is | who shares gradients |
    |---|---|---|
    | in DistributedDataParallel | a rank | DDP, overlapped with backward; its communication hooks work |
    | plain | a rank, or one of `copies` on it | the engine, after backward |
    | `fully_shard`ed over a replicate and a shard dimension (HSDP) | a shard group | FSDP |
    | `fully_shard`ed over the shard dimension only, or tensor parallel | a row of the mesh | the engine |

    With local gradients nobody shares any (DDP runs under `no_sync`, and HSDP without its all-reduce). The model is
    used as it is; all ranks set out from the weights of place 0, which are sent to the others (`send`).

    Args:
        model: this rank's, wrapped or not. The optimizer is made from its parameters, after wrapping.
        group: the ranks, each a place; by default all.
        mesh: instead of a group, where a replica lies on several ranks. Replicas lie along one dimension.
        replicate: that dimension's name; by default `dp_replicate`, `replicate` or `dp`.
        copies: replicas on this rank, deep copies of a plain model, so that N = ranks * copies.
        micro_batches: replicas that are no copies but micro-batches of the one model, as in `hdet.micro_batches`;
            for evidence that needs no divergence. N = ranks * micro_batches. DDP averages in the backward of the last.
        exact: reduce in the order of the replicas, so that parameters agree with one process bit for bit where the
            arithmetic of a replica does; the engine then shares DDP's gradients too, after backward. Slower.
        precision: `torch.bfloat16` or `torch.float16`: merge the differences from the last converged point in it, at
            half the traffic; sums are in float32 at least. A merged parameter is off by at most 2^-7 (2^-10) of the
            largest difference in its tensor: it is rounded when sent and when told. The first merge is in full.
        overlap: let a merge travel beside the next so many steps and apply it as a correction then,
            theta_r <- theta_r + mean(theta at the window's end) - theta_r at the window's end. In these steps
            replicas are still as far apart as the window before had set them, which its successor's losses show.
            Takes two more copies of the parameters, and `merge=hdet.merges.Mean("keep")`. The last merge is waited for.
        send: whether the other ranks are given the weights and buffers of place 0. `hdet.attach` leaves them as they
            are under DistributedDataParallel, which has made the weights alike, and buffers may be each rank's own.

    Raises:
        ConfigError: no process group, a partitioned optimizer (ZeRO), ranks that share one replica where each is to
            be one, a wrapper that averages over other ranks, copies of a wrapped model, a pipeline of stages, a
            parameter that cannot be sent.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            "hdet.distribute needs a process group: run under torchrun and call "
            "torch.distributed.init_process_group() first, or use `with hdet.process_group():`; in one process, "
            "hdet.replicate does the same"
        )
    if group is not None and mesh is not None:
        raise ConfigError("give group= or mesh=, not both: a mesh has its groups")
    if copies < 1 or (micro_batches is not None and micro_batches < 1):
        raise ConfigError(f"copies and micro_batches are at least 1, got {copies} and {micro_batches}")
    if copies > 1 and micro_batches is not None:
        raise ConfigError("give copies= or micro_batches=, not both: copies come apart, micro-batches do not")
    if precision not in (None, torch.bfloat16, torch.float16):
        raise ConfigError(
            f"precision is torch.bfloat16, torch.float16 or None (as the parameters are), got {precision}"
        )
    if overlap < 0 or (overlap and (exact or precision or copies > 1 or micro_batches is not None)):
        raise ConfigError(
            f"overlap is a number of steps, got {overlap}, and goes with one diverging replica a rank only, without "
            f"exact= and precision="
        )
    refusals.pipelined(model, mesh)
    refusals.outside(group)
    bare, wrapper = unwrapped(model)
    refusals.partitioned(model, optimizer)
    refusals.localized(bare, optimizer)
    check_pair(bare, optimizer, micro_batches or copies)
    layout = of_mesh(mesh, replicate) if mesh is not None else of_group(group)
    refusals.shared_replica(bare, layout)
    refusals.shards_of_other_ranks(bare, layout)
    reduces: DistributedDataParallel | str | None = wrapper
    if wrapper is not None:
        refusals.other_group(wrapper, layout)
    elif refusals.reduced_by_sharding(bare, layout):
        reduces = "hsdp"
    if copies > 1 and (wrapper is not None or refusals.sharded(bare)):
        raise ConfigError(
            "copies= needs a plain model, which the engine copies and whose gradients it shares itself; leave "
            "DistributedDataParallel or fully_shard out, or use one replica a rank"
        )
    first = next(iter(bare.parameters()), None)
    if first is None:
        raise ConfigError("the model has no parameters")
    exchange = Exchange(layout, tensors.local(first.detach()).device, exact)
    with translated("sending the first replica's weights"):
        agree(exchange, _described(bare, optimizer, micro_batches or copies, f"{exact} {precision} {overlap}"))
        if send and layout.places > 1:
            refusals.never_sent(bare)
            buffers = filter(can_be_written, map(tensors.local, bare.buffers()))
            exchange.broadcast([*(tensors.local(own.detach()) for own in bare.parameters()), *buffers], 0)
    hosts = [(bare, optimizer), *(twin(bare, optimizer) for _ in range(copies - 1))]
    trained = [model, *(copied for copied, _ in hosts[1:])]
    return Ranks(hosts, trained, exchange, micro_batches or 0, reduces, precision, _travelling(overlap, layout))


def _travelling(overlap: int, layout: Layout) -> tuple[int, Group] | None:
    """The steps of an overlapped merge and a group for it alone."""
    if overlap == 0:
        return None
    group = dist.new_group(sorted(layout.global_peers), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return overlap, Group(group)


def _described(model: nn.Module, optimizer: Optimizer, each: int, options: str) -> dict[str, str]:
    """What must be alike before a single tensor is sent: unequal shapes would hang, or mix up the weights.

    An optimizer's state is merged by place in its groups, so these hold the same parameters in the same order.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        "parameters": repr([(n, tuple(p.shape), _kind(p), p.requires_grad) for n, p in model.named_parameters()]),
        "buffers": repr([(name, tuple(b.shape), _kind(b)) for name, b in model.named_buffers()]),
        "optimizer": " and ".join(
            f"{type(part).__name__} of {[[names[own] for own in group['params']] for group in part.param_groups]}"
            for part in chained(optimizer)
        ),
        "replicas per rank": str(each),
        "exact, precision and overlap": options,
    }


def _kind(tensor: Tensor) -> str:
    """Its type, and whether it is sent."""
    own = tensors.local(tensor.detach())
    return str(own.dtype) if can_be_written(own) else f"{own.dtype}, {own.layout} that cannot be written over"
