"""`hdet.attach` to a network with BatchNorm, its batches whole, beside fixed cosines without hdet.

    python benchmarks/batchnorm.py            # the task `waves` by SGD, three seeds, some three minutes
    python benchmarks/batchnorm.py --adamw

Prints test losses: of the cosines, of the recipe with one rate for all weights, and of its default, a rate for each
matrix.
"""

from __future__ import annotations

import argparse
import math
from typing import Literal, get_args

import torch
from search_parts.task import Setting
from search_parts.tasks.waves import TASK, WaveProblem
from torch import nn

import hdet

Rates = Literal["together", "auto"]

PROBES = 8
FIXED = {"sgd": (0.08, 0.8), "adamw": (0.003, 0.01, 0.03)}
SEARCHED = {"sgd": Setting(0.8, 1e-3), "adamw": Setting(0.01, 0.1)}
"""Rate and decay that the recipe begins with; fixed runs have the decay."""


def optimizer_of(problem: WaveProblem, model: nn.Module, family: str, setting: Setting) -> torch.optim.Optimizer:
    if family == "sgd":
        return torch.optim.SGD(problem.groups(model), lr=setting.lr, momentum=0.9, weight_decay=setting.decay)
    return torch.optim.AdamW(problem.groups(model), lr=setting.lr, weight_decay=setting.decay)


def fixed(family: str, setting: Setting, seed: int) -> float:
    """The test loss of a cosine without hdet."""
    problem = TASK.problem(seed, 0.0)
    assert isinstance(problem, WaveProblem)
    model = problem.model()
    optimizer = optimizer_of(problem, model, family, setting)
    cosine = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / TASK.steps)
    )
    for step in range(TASK.steps):
        optimizer.zero_grad()
        problem.loss(model, problem.batch(step)).backward()
        optimizer.step()
        cosine.step()
    return problem.test_loss(model)


def searched(family: str, setting: Setting, seed: int, rates: Rates) -> float:
    """The test loss of the recipe."""
    torch.manual_seed(seed)  # of dropout's masks
    problem = TASK.problem(seed, 0.0)
    assert isinstance(problem, WaveProblem)
    model = problem.model()
    optimizer = optimizer_of(problem, model, family, setting)
    probe = hdet.Probe(problem.example_losses, [problem.probe(number) for number in range(PROBES)])
    with hdet.attach(
        model, optimizer, probe=probe, total_steps=TASK.steps, seed=seed, rates=rates, quiet=True
    ) as search:
        for step in range(TASK.steps):
            optimizer.zero_grad()
            search.loss(problem.loss(model, problem.batch(step))).backward()
            optimizer.step()
    return problem.test_loss(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adamw", action="store_true", help="in place of SGD with momentum")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    family, seeds = "adamw" if given.adamw else "sgd", range(given.seeds)
    start = SEARCHED[family]
    for lr in FIXED[family]:
        show(f"cosine from {lr:g}, without hdet", [fixed(family, Setting(lr, start.decay), seed) for seed in seeds])
    for rates in get_args(Rates):
        show(f"hdet.attach from {start.lr:g}, {rates}", [searched(family, start, seed, rates) for seed in seeds])


def show(words: str, losses: list[float]) -> None:
    print(f"{words}: {' '.join(f'{loss:.4f}' for loss in losses)}, mean {sum(losses) / len(losses):.3f}", flush=True)


if __name__ == "__main__":
    main()
