"""DistributedDataParallel: the same one line, on every rank.

    torchrun --nproc-per-node 2 examples/ddp.py --steps 200

hdet finds that the ranks train one model, and decides the same on each. Rank 0 writes the history.
"""

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import hdet

CENTRES = torch.randn(10, 20, generator=torch.Generator().manual_seed(0))


def examples(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(10, (count,), generator=generator)
    return CENTRES[labels] + 2 * torch.randn(count, 20, generator=generator), labels


def train(steps: int) -> dict[str, float]:
    """What was learned, by knob; the same on every rank."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)

    same = torch.Generator().manual_seed(1)  # the probe is the same on every rank, the training data are not
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
