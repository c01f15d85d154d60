"""What the engine's step takes between window ends where parameters are sharded by `fully_shard`, on 2 ranks over gloo.

    python benchmarks/sharded_step.py [--quick]

144 linear layers of 8 x 8 with biases, 288 DTensors; rates and decay by `Line` and `Analytic`, two micro-batches.
Printed: the median CPU time of `engine.step` and of `engine.share_gradients`, on rank 0, and
of the same model without sharding.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from heap import settle
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hdet
from hdet.controllers import Hold

LAYERS = 144


def measured(sharded: bool, count: int) -> dict[str, float]:
    """Median seconds of each call."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))
    options: dict[str, Any] = {}
    if sharded:
        mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        options = {"mesh": mesh, "replicate": "replicate"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    distribute = hdet.distribute if sharded else hdet.micro_batches
    amount: dict[str, Any] = {"micro_batches": 2} if sharded else {"n": 2}
    engine = hdet.Engine(
        distribute(model, optimizer, **amount, **options),
        [
            hdet.LearningRate(evidence=hdet.evidence.Line(), controller=Hold()),
            hdet.WeightDecay(evidence=hdet.evidence.Analytic(), controller=Hold()),
        ],
        window=count + 10,
        signal=hdet.Probe(lambda model, batch: model(batch).square().mean(), [torch.ones(2, 8)] * 2),
    )
    spent: dict[str, list[float]] = {"engine.share_gradients": [], "engine.step": []}
    clock = time.thread_time
    for _ in range(count + 5):
        losses = []
        for replica in engine.replicas:
            with replica:
                loss = model(torch.ones(2, 8)).square().mean()
                loss.backward()
            losses.append(loss.detach())
        settle()
        began = clock()
        engine.share_gradients()
        shared = clock()
        optimizer.step()
        optimizer.zero_grad()
        settle()
        stepped = clock()
        engine.step(losses)
        spent["engine.step"].append(clock() - stepped)
        spent["engine.share_gradients"].append(shared - began)
    return {call: statistics.median(own[5:]) for call, own in spent.items()}


def measure(count: int) -> None:
    found = {name: measured(name == "sharded", count) for name in ("sharded", "not sharded")}
    if dist.get_rank() == 0:
        print(f"{'ms, ' + str(2 * LAYERS) + ' tensors':<28}" + "".join(f"{name:>14}" for name in found))
        for call in next(iter(found.values())):
            print(f"{call:<28}" + "".join(f"{1e3 * own[call]:>14.3f}" for own in found.values()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10 steps instead of 40")
    on_ranks(measure, 2, 10 if parser.parse_args().quick else 40)


if __name__ == "__main__":
    main()
