"""`OneCycleHDET` in the place of `torch.optim.lr_scheduler.OneCycleLR`: the paper's search over the ranks of DDP.

    torchrun --nproc-per-node 4 examples/one_cycle.py --steps 200

Two lines of an ordinary loop change: the scheduler's class, with a spread, and the loss that its step takes. In one
process, or with --spread 0, it is OneCycleLR to the last bit.
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


def train(steps: int, spread: float = 0.2, window: int = 10) -> dict[str, float]:
    """The rate that the run ended with, and the loss on data it never saw; the same on every rank."""
    torch.manual_seed(0)
    ranks = dist.is_initialized() and dist.get_world_size() > 1
    model: nn.Module = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))
    model = DistributedDataParallel(model) if ranks else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # Was: OneCycleLR(optimizer, max_lr=0.05, total_steps=steps)
    scheduler = hdet.OneCycleHDET(optimizer, max_lr=0.05, total_steps=steps, spread=spread, window=window, model=model)

    own = torch.Generator().manual_seed(100 + (dist.get_rank() if ranks else 0))
    for _ in range(steps):
        inputs, labels = examples(32, own)
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(loss)  # was: scheduler.step()
    rate = next(iter(scheduler.bases.values())) if ranks and spread > 0 else scheduler.get_last_lr()[0]
    inputs, labels = examples(2000, torch.Generator().manual_seed(1))
    with torch.no_grad():
        return {"rate": float(rate), "test_loss": float(F.cross_entropy(model(inputs), labels))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--spread", type=float, default=0.2)
    options = parser.parse_args()
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    try:
        found = train(options.steps, options.spread)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(found)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
