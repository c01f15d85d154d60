"""What the ranks of the shared launch run: every home of replicas, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from training import (
    batch,
    batch_normed,
    chained_of,
    difference,
    knobs,
    loss_of,
    network,
    optimizer_of,
    probe,
    told,
    train,
    weights,
)

import hdet
from hdet.controllers import Hold
from hdet.merges import Mean
from hdet.schedules import OneCycle
from hdet.spreads import TwoLevel

STEPS, WINDOW = 12, 4
Found = dict[str, Any]


def engine_of(replicas: hdet.replicas.Replicas, **options: Any) -> hdet.Engine:
    declared = {"knobs": knobs(), "window": WINDOW, "total_steps": STEPS, **options}
    return hdet.Engine(replicas, declared.pop("knobs"), **declared)


def outcome(engine: hdet.Engine) -> Found:
    return {
        "history": told(engine),
        "weights": weights(engine)[0],
        "buffers": [buffer.clone() for buffer in engine.hosts[0][0].buffers()],
        "bases": engine.bases,
    }


def judged_at_averages() -> list[hdet.Knob]:
    """A rate that is read at averaged weights, of replicas that weight decay sets apart."""
    line = hdet.evidence.Line(read_average_above=None)
    return [
        hdet.LearningRate(evidence=line, controller=Hold()),
        hdet.WeightDecay(spread=TwoLevel(0.3), evidence=hdet.evidence.Divergent(), controller=Hold()),
    ]


def one_process(
    n: int,
    make: Callable[[], nn.Module] = network,
    each: int = 1,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = optimizer_of,
    **options: Any,
) -> Found:
    model = make()
    engine = engine_of(hdet.replicate(model, optimizer(model), n=n), **options)
    train(engine, STEPS, parts=range(each), each=each)
    return outcome(engine)


def many_ranks(
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    make: Callable[[], nn.Module] = network,
    part: int = 0,
    each: int = 1,
    home: Found | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = optimizer_of,
    **options: Any,
) -> Found:
    model = wrap(make())
    engine = engine_of(hdet.distribute(model, optimizer(model), **(home or {})), **options)
    train(engine, STEPS, parts=(part,), each=each)
    return outcome(engine)


def sharded_over(mesh: Any) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        for layer in model:  # type: ignore[attr-defined]
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    return wrap


def data_parallel() -> Found:
    found: Found = {}
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[dist.get_rank() // 2]
    for gradients in ("shared", "local"):
        for exact in (False, True):
            options: Found = {"gradients": gradients}
            name = f"{gradients}{' exact' if exact else ''}"
            found[f"ddp {name}"] = many_ranks(DistributedDataParallel, home={"exact": exact}, **options)
            found[f"plain {name}"] = many_ranks(home={"exact": exact}, **options)
        found[f"pair {gradients}"] = many_ranks(
            lambda model: DistributedDataParallel(model, process_group=pair),
            home={"group": pair, "exact": True},
            gradients=gradients,
        )
        found[f"batch norm {gradients}"] = many_ranks(
            DistributedDataParallel, batch_normed, home={"exact": True}, gradients=gradients
        )
    found["averages"] = many_ranks(
        make=batch_normed, home={"exact": True}, knobs=judged_at_averages(), signal=probe(), gradients="local"
    )
    found["chained"] = many_ranks(
        DistributedDataParallel, home={"exact": True}, optimizer=chained_of, gradients="local"
    )
    for at in ("last", "average"):
        found[f"probe {at}"] = many_ranks(DistributedDataParallel, home={"exact": True}, signal=probe(at))
    found["tilt"] = many_ranks(
        DistributedDataParallel, home={"exact": True}, signal=probe(), evidence=hdet.evidence.Divergent(tilt=1.0)
    )
    for gradients in ("shared", "local"):
        found[f"copies {gradients}"] = many_ranks(home={"copies": 2}, gradients=gradients)
        found[f"copies {gradients} exact"] = many_ranks(
            make=batch_normed, home={"copies": 2, "exact": True}, gradients=gradients
        )
    return found


def in_parts() -> Found:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    part = mesh.get_local_rank("dp_shard")
    found: Found = {}
    both: Found = {"part": part, "each": 2}
    found["hsdp shared"] = many_ranks(sharded_over(mesh), home={"mesh": mesh}, **both)
    for gradients in ("shared", "local"):
        home = {"mesh": mesh, "exact": True}
        for name, over in (("shards", mesh["dp_shard"]), ("hsdp exact", mesh)):
            found[f"{name} {gradients}"] = many_ranks(sharded_over(over), home=home, gradients=gradients, **both)
    found["hsdp batch norm"] = many_ranks(sharded_over(mesh), batch_normed, home={"mesh": mesh}, **both)
    found["hsdp probe"] = many_ranks(sharded_over(mesh), home={"mesh": mesh}, signal=probe("average"), **both)
    found["hsdp tilt"] = many_ranks(
        sharded_over(mesh), home={"mesh": mesh}, signal=probe(), evidence=hdet.evidence.Divergent(tilt=1.0), **both
    )
    tensor_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for gradients in ("shared", "local"):
        found[f"tensor parallel {gradients}"] = many_ranks(
            lambda model: parallelize_module(
                model, tensor_mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
            ),
            home={"mesh": tensor_mesh},
            gradients=gradients,
        )
    return found


def compressed(model: nn.Module) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return wrapped


def low_rank(model: nn.Module) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=4)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped


HOOKS = {"fp16": compressed, "PowerSGD": low_rank}


def without_hdet(wrap: Callable[[nn.Module], nn.Module], make: Callable[[], nn.Module]) -> list[torch.Tensor]:
    """Parameters and buffers after plain training by DDP."""
    model = wrap(make())
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, STEPS, cycle_momentum=False)
    for step in range(STEPS):
        loss_of(model, batch(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 < STEPS:
            scheduler.step()
    return [t.detach() for t in (*model.parameters(), *model.buffers())]


def spread_zero() -> Found:
    """hdet with nothing to explore, beside DDP alone; a rank's buffers are compared with those of rank 0."""
    found: Found = {}
    cases = {
        "plain": (DistributedDataParallel, network),
        "batch norm": (DistributedDataParallel, batch_normed),
        **{name: (wrap, network) for name, wrap in HOOKS.items()},
    }
    for name, (wrap, make) in cases.items():
        alone = without_hdet(wrap, make)
        for tensor in alone[len(list(make().parameters())) :]:
            dist.broadcast(tensor, 0)
        for policy in ("average", "keep"):
            still = hdet.LearningRate(spread=TwoLevel(0.0), controller=Hold(), schedule=OneCycle(0.02, STEPS))
            with_hdet = many_ranks(wrap, make, knobs=[still], merge=Mean(policy))
            ours = [*with_hdet["weights"], *with_hdet["buffers"]]
            found[name, policy] = {"difference": difference(ours, alone), "same": all(map(torch.equal, ours, alone))}
        found[name] = alone
    return found


def everything() -> Found:
    return {
        **data_parallel(),
        **in_parts(),
        **{f"{name} hook": many_ranks(wrap) for name, wrap in HOOKS.items()},
        "spread zero": spread_zero(),
    }
