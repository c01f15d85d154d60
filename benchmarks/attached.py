"""What `hdet.attach` takes of each step, beside the same loop written for the engine and the loop without hdet.

    python benchmarks/attached.py [--quick]

A network of 433 parameters, so that a step is calls and no arithmetic; the recipe's rates and decay (`Line`,
`Analytic`), and its dropout (`Contrast`), over windows that do not end; one rate, and one for each of two matrices
and for the rest; in the last rows a scheduler of torch's drives the rate. The loops take steps in turns, in random
order. Printed: how many Python functions and operators a step calls, which is the same on any machine; medians over
steps of the CPU time of one, and of the difference to the step without hdet in the same turn, with its quartiles.
"""

from __future__ import annotations

import argparse
import cProfile
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import hdet

LONG = 100_000
OPTIONS: dict[str, Any] = {"total_steps": LONG, "window": LONG // 20, "micro_batches": 1, "quiet": True}
Step = Callable[[], None]


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch).square().mean()
    return found


BATCH = torch.ones(16, 8)
PROBE = hdet.Probe(loss_of, [BATCH, 2 * BATCH])


def explicit() -> Step:
    model, optimizer = network()
    engine = hdet.recommended(model, optimizer, probe=PROBE, exclude=["dropout"], **OPTIONS)

    def step() -> None:
        for replica in engine.replicas:
            with replica:
                loss = loss_of(model, BATCH)
                loss.backward()
        engine.share_gradients()
        optimizer.step()
        optimizer.zero_grad()
        engine.step([loss])

    return step


def scheduled(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, LONG)


def plain(by_torch: bool = False) -> Step:
    model, optimizer = network()
    scheduler = scheduled(optimizer) if by_torch else None

    def step() -> None:
        loss_of(model, BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()

    return step


def attached(rates: Any, exclude: Sequence[str], by_torch: bool = False) -> Step:
    model, optimizer = network()
    scheduler = scheduled(optimizer) if by_torch else None
    search = hdet.attach(model, optimizer, probe=PROBE, rates=rates, exclude=exclude, scheduler=scheduler, **OPTIONS)

    def step() -> None:
        search.loss(loss_of(model, BATCH)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()

    return step


LOOPS: dict[str, Callable[[], Step]] = {
    "without hdet": plain,
    "hdet.Engine": explicit,
    "hdet.attach, one rate": partial(attached, "together", ["dropout"]),
    "hdet.attach, three": partial(attached, "matrices", ["dropout"]),
    "one, and a dropout": partial(attached, "together", []),
    "three, and a dropout": partial(attached, "matrices", []),
    "without, torch's scheduler": partial(plain, by_torch=True),
    "one, torch's scheduler": partial(attached, "together", ["dropout"], by_torch=True),
    "three, torch's scheduler": partial(attached, "matrices", ["dropout"], by_torch=True),
}


def calls(step: Step, count: int = 20) -> float:
    """Functions that a step calls."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(count):
        step()
    profile.disable()
    return sum(entry.callcount for entry in profile.getstats()) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="50 steps instead of 400")
    count = 50 if parser.parse_args().quick else 400
    torch.set_num_threads(1)
    steps = {name: make() for name, make in LOOPS.items()}
    order = random.Random(0)  # whichever comes after another finds its caches as that one left them
    spent: dict[str, list[float]] = {name: [] for name in LOOPS}
    for number in range(count + 20):
        for name, step in order.sample(list(steps.items()), len(steps)):
            began = time.thread_time()
            step()
            if number >= 20:
                spent[name].append((time.thread_time() - began) * 1e6)
    print(f"{'a step':<28}{'calls':>10}{'us':>10}{'more than without':>20}{'quartiles':>20}")
    for name, own in spent.items():
        more = [a - b for a, b in zip(own, spent["without hdet"], strict=True)]
        low, middle, high = statistics.quantiles(more, n=4)
        spread = f"{low:.0f} to {high:.0f}"
        called = calls(steps[name])
        print(f"{name:<28}{called:>10.0f}{statistics.median(own):>10.0f}{middle:>20.0f}{spread:>20}")


if __name__ == "__main__":
    main()
