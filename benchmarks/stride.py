"""What a stride costs in quality: averaged weights from every stride-th step against those from every step.

    python benchmarks/stride.py [--long] [--quick]

Runs of the digits and the text task (a small GPT), AdamW under a cosine, `Line` evidence read in every window and a
controller that holds: all strides see the same trajectory and the same probe, and only the average differs. By task,
window and stride are printed, each the median over seeds of the median over windows, with the least and largest seed:

- the slope at averaged weights over that at stride 1;
- the same of t;
- |t - t at stride 1|;
- the share of windows in which "lower" (t > 3, as `Calibrate` asks) is decided otherwise than at stride 1.

With `--long`, windows of 1,000 steps, at strides that leave 142, 66 and 32 of them: the first is that of `stride=None`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

import hdet
from hdet.app.tasks import Digits, Text, Workload
from hdet.controllers import Hold
from hdet.replicas.average import ENOUGH
from hdet.schedules import Cosine

STRIDES = {20: (2, 5, 10), 60: (2, 5, 10)}
LONG = {1000: (1000 // ENOUGH, 15, 31)}
"""By the window's length, the strides that are compared with 1."""

LOWER = 3.0
RATE = 1e-2

Build = Callable[[int], Workload]

TASKS: dict[str, Build] = {
    "digits": lambda seed: Digits().build(seed=seed, batch_size=32),
    "text": lambda seed: Text(width=32, depth=2, heads=2, context=32).build(seed=seed, batch_size=8),
}


def run(build: Build, seed: int, window: int, stride: int, steps: int) -> NDArray[np.float64]:
    """[windows, 2]: slope and t at averaged weights."""
    workload = build(seed)
    model = workload.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    rate = hdet.LearningRate(
        schedule=Cosine(RATE, steps, warmup=0.1),
        evidence=hdet.evidence.Line(stride=stride, read_average_above=-1e9, preview=0.0),
        controller=Hold(),
    )
    probe = hdet.Probe(workload.loss, workload.probe)
    engine = hdet.Engine(hdet.micro_batches(model, optimizer, 1), [rate], window=window, signal=probe)
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # of dropout: the trajectory is the same for every stride
        for step in range(steps):
            with engine.replicas[0] as replica:
                loss = workload.loss(replica.model, workload.batch(step, 0))
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.step(loss.detach())
    averaged = [record.estimates["learning_rate"]["averaged"] for record in engine.history]
    return np.array([(estimate["slope"], estimate["t"]) for estimate in averaged])


def summary(by_seed: Sequence[float]) -> str:
    """The median over seeds, and the least and largest."""
    return f"{np.median(by_seed):6.2f} ({min(by_seed):.2f} to {max(by_seed):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, a quarter of the steps")
    parser.add_argument("--long", action="store_true", help="windows of 1,000 steps")
    given = parser.parse_args()
    seeds, steps = (range(1), 60) if given.quick else (range(3), 240)
    windows = STRIDES
    if given.long:
        windows, steps = LONG, 2000 if given.quick else 5000
    torch.set_num_threads(1)
    print(f"{len(seeds)} seeds, {steps} steps, peak rate {RATE:g}")
    print("task    window  stride  slope ratio          t ratio              |t - t1|             decided otherwise")
    for task, build in TASKS.items():
        for window, strides in windows.items():
            found = {stride: [run(build, seed, window, stride, steps) for seed in seeds] for stride in (1, *strides)}
            for stride in strides:
                pairs = list(zip(found[stride], found[1], strict=True))
                columns = [
                    [float(np.median(own[:, 0] / each[:, 0])) for own, each in pairs],
                    [float(np.median(own[:, 1] / each[:, 1])) for own, each in pairs],
                    [float(np.median(abs(own[:, 1] - each[:, 1]))) for own, each in pairs],
                    [float(np.mean((own[:, 1] > LOWER) != (each[:, 1] > LOWER))) for own, each in pairs],
                ]
                print(f"{task:<7} {window:6d}  {stride:6d}  " + "  ".join(f"{summary(c):<19}" for c in columns))


if __name__ == "__main__":
    main()
