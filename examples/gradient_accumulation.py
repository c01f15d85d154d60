"""Gradient accumulation with clipping and a scheduler of your own: none of it changes.

    python examples/gradient_accumulation.py --steps 200

Passes between two optimizer steps are counted as micro-batches. Dropout is compared between them, which is less noisy
than between steps.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import hdet

CENTRES = torch.randn(10, 20, generator=torch.Generator().manual_seed(0))
MICRO_BATCHES = 4


def examples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(10, (count,))
    return CENTRES[labels] + 2 * torch.randn(count, 20), labels


def train(steps: int) -> hdet.Search:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=steps + 1)

    held_out = [examples(64) for _ in range(8)]
    probe = hdet.Probe(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), held_out)
    search = hdet.attach(
        model, optimizer, probe=probe, total_steps=steps, scheduler=scheduler, micro_batches=MICRO_BATCHES
    )

    for _ in range(steps):
        for _ in range(MICRO_BATCHES):
            inputs, labels = examples(16)
            loss = F.cross_entropy(model(inputs), labels)
            (search.loss(loss) / MICRO_BATCHES).backward()  # told before the division
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()  # it goes on deciding the schedule; hdet finds the factor on it
        optimizer.zero_grad()
    return search


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    for name, learned in train(parser.parse_args().steps).shifts.items():
        print(f"{name}: {learned}")
