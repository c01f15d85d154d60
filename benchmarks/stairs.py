"""A warm-up that is stepped once an epoch: is its rate taken for what the run heads for, as long as an epoch lasts?

    python benchmarks/stairs.py                 # AdamW and SGD, 3 seeds: about 15 minutes on one core
    python benchmarks/stairs.py --seeds 1 --epoch-steps 50

A perceptron learns what a smaller one says with noise, 20 epochs, by torchvision's reference schedule: five epochs from
a hundredth of the peak (`LinearLR`), then a cosine. Held-out loss at the end without hdet; with it where the scheduler
is stepped in each step, once an epoch (`scheduler_every=`), and where nobody tells hdet of it (`schedule=None`); in
brackets the highest peak that a window left any matrix, over the one that was set (where hdet was not told, the highest
rate so far takes the place of the peak). The loss is not told, so that no guard goes back.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR

import hdet

EPOCHS, WARM, FIRST = 20, 5, 0.01
INPUTS, CLASSES, BATCH = 32, 10, 64
RATES = {"AdamW": 1e-3, "SGD": 0.1}
ROWS = ("without hdet", "stepped in each step", "once an epoch", "once an epoch, followed")
Rows = tuple[Tensor, Tensor]


def network(width: int, activation: Callable[[], nn.Module], layers: int) -> nn.Sequential:
    inner = [part for _ in range(layers - 1) for part in (nn.Linear(width, width), activation())]
    return nn.Sequential(nn.Linear(INPUTS, width), activation(), *inner, nn.Linear(width, CLASSES))


torch.manual_seed(1)
TEACHER = network(64, nn.Tanh, 1)


@torch.no_grad()
def draw(count: int, generator: torch.Generator) -> Rows:
    inputs = torch.randn(count, INPUTS, generator=generator)
    noise = 0.5 * torch.randn(count, CLASSES, generator=generator)
    return inputs, (3 * TEACHER(inputs) + noise).argmax(dim=1)


def loss_of(model: nn.Module, rows: Rows) -> Tensor:
    return F.cross_entropy(model(rows[0]), rows[1])


def per_epoch(optimizer: Optimizer) -> SequentialLR:
    """As torchvision's references/classification/train.py has it."""
    rise = LinearLR(optimizer, start_factor=FIRST, total_iters=WARM)
    return SequentialLR(optimizer, [rise, CosineAnnealingLR(optimizer, T_max=EPOCHS - WARM)], milestones=[WARM])


def per_step(optimizer: Optimizer, epoch_steps: int) -> LambdaLR:
    def factor(step: int) -> float:
        epoch = step / epoch_steps
        if epoch < WARM:
            return FIRST + (1 - FIRST) * epoch / WARM
        return 0.5 * (1 + math.cos(math.pi * (epoch - WARM) / (EPOCHS - WARM)))

    return LambdaLR(optimizer, factor)


def run(kind: str, row: str, seed: int, epoch_steps: int) -> tuple[float, float]:
    """The held-out loss that a run ends with, and the highest factor on the peak that a window left."""
    torch.manual_seed(seed)
    model, rate = network(256, nn.ReLU, 2), RATES[kind]
    optimizer = AdamW(model.parameters(), rate) if kind == "AdamW" else SGD(model.parameters(), rate, momentum=0.9)
    by_step = row == "stepped in each step"
    scheduler = per_step(optimizer, epoch_steps) if by_step else per_epoch(optimizer)
    known = {"scheduler": scheduler, "scheduler_every": 1 if by_step else epoch_steps}
    held_out = torch.Generator().manual_seed(7)
    probe = hdet.Probe(loss_of, [draw(16, held_out) for _ in range(8)])
    steps, search = EPOCHS * epoch_steps, None
    if row != ROWS[0]:
        how = known if row != ROWS[-1] else {"schedule": None}
        search = hdet.attach(model, optimizer, probe=probe, total_steps=steps, seed=seed, quiet=True, **how)
    training = torch.Generator().manual_seed(1000 + seed)
    for step in range(steps):
        loss_of(model, draw(BATCH, training)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if by_step or (step + 1) % epoch_steps == 0:
            scheduler.step()
    told = search.history if search is not None else ()
    learned = [own for record in told for own in record.learned.items()]
    highest = max((own["closed"] for name, own in learned if "learning_rate" in name), default=rate) / rate
    with torch.no_grad():
        return float(loss_of(model, draw(4000, torch.Generator().manual_seed(99)))), highest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epoch-steps", type=int, default=150)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "hdet was told no training loss")
    print("held-out loss at the end, mean (worst of the seeds) [highest peak over the one set]")
    print(" " * 26 + "".join(kind.rjust(30) for kind in RATES))
    for row in ROWS:
        line = row.ljust(26)
        for kind in RATES:
            found = [run(kind, row, seed, given.epoch_steps) for seed in range(given.seeds)]
            losses, highest = zip(*found, strict=True)
            line += f"{np.mean(losses):.3f} ({max(losses):.3f}) [x {max(highest):.3g}]".rjust(30)
        print(line, flush=True)


if __name__ == "__main__":
    main()
