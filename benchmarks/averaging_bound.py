"""A bound on the window T: how long replicas with local gradients may train before their mean is expected to cost more
than a stated share of the loss, from their measured divergence and the curvature along it.

    python benchmarks/averaging_bound.py --seeds 3 --out runs/averaging_bound

The runs are those of studies/averaging.yaml (8 replicas, batch 4, AdamW at a one-cycle rate of 0.01, 320 steps), merged
every 20 steps. At the end of some windows, before the merge, with theta_r = mean + delta_r:

    D(t) = mean_r |delta_r|^2                   the divergence, t steps into the window
    c    = mean_r [L(mean + delta_r) - 2 L(mean) + L(mean - delta_r)] / D     the curvature along it, on held-out data
    E(T) = c D(T) / 2                           how far above the mean's loss the replicas train at the window's end

D grows as t^p, p fitted between half the window and its end. Up to second order replicas at distance delta_r see
gradients of a loss that lies E above that of the weights which are kept, and a window costs E(T) / L of the loss. So

    T* = T (share L / E(T))^(1 / p)

is the longest window within a share. Beside it stands what studies/averaging.yaml observed: held-out loss at each T
over that of T = 1, where averaging alone is done at every step.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import hdet
from hdet.app.tasks import Digits, Text
from hdet.app.tasks.task import Task, Workload
from hdet.hparams.schedule import OneCycle
from hdet.merges import Mean
from hdet.replicas import tensors
from hdet.spreads import TwoLevel

TASKS: dict[str, Task] = {
    "gpt": Text(width=32, depth=2, heads=2, context=32),
    "digits": Digits(width=32, depth=2, label_noise=0.2),
}
REPLICAS, BATCH, STEPS, WINDOW, PEAK = 8, 4, 320, 20, 0.01
LOOKED_AT = (3, 7, 11)  # windows
SHARES = (0.01, 0.03, 0.1)
OBSERVED = Path(__file__).parents[1] / "docs" / "results" / "averaging_test_loss.csv"


def divergence(models: list[torch.nn.Module]) -> tuple[list[Tensor], list[list[Tensor]], float]:
    """The mean, each replica's distance from it, and D."""
    weights = [tensors.parameters(model) for model in models]
    mean = [torch.stack(same).mean(0) for same in zip(*weights, strict=True)]
    apart = [[w - m for w, m in zip(own, mean, strict=True)] for own in weights]
    return mean, apart, float(np.mean([sum(float(d.square().sum()) for d in own) for own in apart]))


@torch.no_grad()
def held_out(work: Workload, model: torch.nn.Module, weights: list[Tensor], window: int) -> float:
    model.eval()
    with tensors.substituted(tensors.parameters(model), weights):
        loss = float(torch.stack([work.loss(model, batch) for batch in work.probe(window)]).mean())
    model.train()
    return loss


def measured(task: Task, seed: int) -> Iterator[dict[str, float]]:
    """What each looked-at window of one run came to."""
    work = task.build(seed=seed, batch_size=BATCH)
    model = work.model()
    optimizer = torch.optim.AdamW(work.groups(model), lr=PEAK)
    engine = hdet.Engine(
        hdet.replicate(model, optimizer, n=REPLICAS),
        [hdet.LearningRate(schedule=OneCycle(PEAK, total_steps=STEPS), spread=TwoLevel(0.0))],
        window=WINDOW,
        gradients="local",
        merge=Mean("keep"),
        total_steps=STEPS,
    )
    half = math.nan
    for step in range(STEPS):
        losses = []
        for replica in engine.replicas:
            with replica:
                loss = work.loss(replica.model, work.batch(step, replica.index))
                loss.backward()
            losses.append(loss.detach())
        for own in engine.optimizers:
            own.step()
            own.zero_grad()
        window, within = divmod(step, WINDOW)
        if window in LOOKED_AT and within + 1 == WINDOW // 2:
            half = divergence([replica.model for replica in engine.replicas])[2]
        if window in LOOKED_AT and within + 1 == WINDOW:
            mean, apart, distance = divergence([replica.model for replica in engine.replicas])
            at_mean = held_out(work, model, mean, window)
            sides = [
                [held_out(work, model, [m + sign * d for m, d in zip(mean, own, strict=True)], window) for own in apart]
                for sign in (1.0, -1.0)
            ]
            elevation = float(np.mean(sides[0]) + np.mean(sides[1])) / 2 - at_mean
            yield {
                "seed": seed,
                "step": step + 1,
                "loss": at_mean,
                "divergence": distance,
                "curvature": 2 * elevation / distance,
                "elevation": elevation,
                "growth": math.log2(distance / half),
            }
        engine.step(losses)


def longest(row: dict[str, float], share: float) -> float:
    """T*, infinite where the replicas do not lie above their mean."""
    if row["elevation"] <= 0.0:
        return math.inf
    return WINDOW * float((share * row["loss"] / row["elevation"]) ** (1.0 / row["growth"]))


def observed(task: str) -> dict[int, float]:
    """By T, the share by which the held-out loss lay above that of T = 1."""
    with OBSERVED.open() as file:
        rows = {row["variant"]: float(row["mean"]) for row in csv.DictReader(file) if row["task"] == task}
    found = {int(name.rpartition(" ")[2]): mean for name, mean in rows.items() if name.startswith("local")}
    return {window: mean / found[1] - 1.0 for window, mean in sorted(found.items()) if window > 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/averaging_bound"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, task in TASKS.items():
        rows = [row for seed in range(arguments.seeds) for row in measured(task, seed)]
        found[name] = rows
        print(
            f"{name}: {arguments.seeds} seeds, windows of {WINDOW} steps ending at {[row['step'] for row in rows[:3]]}"
        )
        for key in ("loss", "elevation", "growth"):
            values = [row[key] for row in rows]
            print(f"  {key:10s} median {np.median(values):.4g}, from {min(values):.4g} to {max(values):.4g}")
        for share in SHARES:
            bounds = [longest(row, share) for row in rows]
            print(
                f"  within {share:.0%}: T* median {np.median(bounds):.0f}, from {min(bounds):.0f} to {max(bounds):.0f}"
            )
        seen = ", ".join(f"T {window} {share:+.1%}" for window, share in observed(name).items())
        print(f"  observed at the end of whole runs, over T = 1: {seen}")
    (arguments.out / "result.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
