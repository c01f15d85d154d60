"""HSDP: parameters sharded inside groups of ranks, the groups in data parallel.

    torchrun --nproc-per-node 4 examples/hsdp.py --steps 200

A group of ranks that together hold one model is one replica. Learning rate and weight decay are explored; knobs of the
forward pass need `objective=` on shards.
"""

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import hdet

CENTRES = torch.randn(10, 20, generator=torch.Generator().manual_seed(0))


def examples(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(10, (count,), generator=generator)
    return CENTRES[labels] + 2 * torch.randn(count, 20, generator=generator), labels


def train(steps: int) -> dict[str, float]:
    """What was learned, by knob; the same on every rank."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)

    same = torch.Generator().manual_seed(1)
    held_out = [examples(64, same) for _ in range(8)]
    own = torch.Generator().manual_seed(100 + dist.get_rank())
    probe = hdet.Probe(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), held_out)
    search = hdet.attach(model, optimizer, probe=probe, total_steps=steps, quiet=dist.get_rank() != 0)

    for _ in range(steps):
        inputs, labels = examples(32, own)
        search.loss(F.cross_entropy(model(inputs), labels)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: learned.value for name, learned in search.shifts.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    try:
        found = train(parser.parse_args().steps)
        if dist.get_rank() == 0:
            print(found)
    finally:
        dist.destroy_process_group()
