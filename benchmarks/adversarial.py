"""A small GAN, a search for each of its models: how far samples end from the data, by what the generator's probe is.

    python benchmarks/adversarial.py --seeds 5

Points on a noisy ring, two multilayer perceptrons, 1500 steps of Adam at one rate for both. Printed is the energy
distance between samples and data: its median over seeds, and the largest. Two samples of the data are some 0.001 apart.
"""

from __future__ import annotations

import argparse
import warnings
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim.lr_scheduler import LambdaLR

import hdet

STEPS, BATCH, RISE = 1500, 64, 450
RATES = (1e-4, 1e-3, 1e-2)
WAYS = ("without hdet", "own loss", "own loss, guard and tail", "distance", "distance, guard and tail")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = range(parser.parse_args().seeds)
    warnings.simplefilter("ignore")  # how small a probe is, and that the guard put a model back
    print(f"| rate | {' | '.join(WAYS)} |\n|{'---|' * (len(WAYS) + 1)}", flush=True)
    for rate in RATES:
        ends = [[trained(rate, way, seed) for seed in seeds] for way in WAYS]
        print(f"| {rate:g} | {' | '.join(f'{median(end):.3f}, {max(end):.3f}' for end in ends)} |", flush=True)


def trained(rate: float, way: str, seed: int) -> float:
    """The energy distance that a run ends at; without hdet the rates rise and fall as hdet's own schedule does."""
    torch.manual_seed(seed)
    generator, critic = network(4, nn.ReLU(), 2), network(2, nn.LeakyReLU(0.2), 1)
    models = (critic, generator)
    optimizers = [torch.optim.Adam(model.parameters(), lr=rate, betas=(0.5, 0.9)) for model in models]
    held_out = [(ring(32), torch.randn(32, 4)) for _ in range(8)]

    def of_critic(model: nn.Module, batch: Any) -> Tensor:
        return judged(model(batch[0]), True) + judged(model(generator(batch[1])), False)

    def of_generator(model: nn.Module, batch: Any) -> Tensor:
        made = model(batch[1])
        return distance(made, batch[0]) if way.startswith("distance") else judged(critic(made), True)

    searches: list[hdet.Search] = []
    if way == "without hdet":
        schedulers = [LambdaLR(optimizer, risen_and_fallen) for optimizer in optimizers]
    else:
        kept: Any = {} if way.endswith("tail") else {"guard": None, "tail": None}
        for model, optimizer, told in zip(models, optimizers, (of_critic, of_generator), strict=True):
            probe = hdet.Probe(told, held_out)
            searches.append(hdet.attach(model, optimizer, probe=probe, total_steps=STEPS, quiet=True, **kept))
        schedulers = []
    for _ in range(STEPS):
        real, made = ring(BATCH), generator(torch.randn(BATCH, 4))
        for turn, optimizer in enumerate(optimizers):
            critic.requires_grad_(turn == 0)
            if turn == 0:
                loss = judged(critic(real), True) + judged(critic(made.detach()), False)
            else:
                loss = judged(critic(made), True)
            optimizer.zero_grad()
            (searches[turn].loss(loss) if searches else loss).backward()
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    with torch.no_grad():
        data = ring(1500)
        return float(distance(generator(torch.randn(1500, 4)), data) - torch.cdist(data, data).mean())


def risen_and_fallen(step: int) -> float:
    return min((step + 1) / RISE, (STEPS - step) / (STEPS - RISE))


def network(inputs: int, activation: nn.Module, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), activation, nn.Linear(64, 64), activation, nn.Linear(64, outputs))


def ring(count: int) -> Tensor:
    angles = 2 * torch.pi * torch.rand(count)
    return torch.stack([angles.cos(), angles.sin()], dim=1) + 0.1 * torch.randn(count, 2)


def judged(scores: Tensor, real: bool) -> Tensor:
    return binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


def distance(made: Tensor, real: Tensor) -> Tensor:
    """The energy distance, but for the part that no generator changes."""
    return 2 * torch.cdist(made, real).mean() - torch.cdist(made, made).mean()


if __name__ == "__main__":
    main()
