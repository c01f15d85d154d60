"""A learning rate's slope without a probe: the next steps' gradients along the update of the window that has closed.

    python benchmarks/free_slopes.py
    python benchmarks/free_slopes.py --tasks text_small ratings --seeds 3 --csv free_slopes.csv

`Line` reads dL/dlog(lr) = <grad L(theta_T), U>, with U the window's update, off probe batches at two points. The first
steps of the next window work gradients out anyway: <g, U> of these is a slope of the training loss, for a product a
step. It is the same slope if the examples are new, the model is one thing in training and evaluation, and the loss
bends little between the probe's points; later steps are at other weights.

Here both are read off plain training (straight line, 30 % warm-up, windows as the recipe's), and compared with a large
probe of 16 other batches:

    probe       the task's probe batch, two points, as `Line` without its preview
    steps 1, 3  the mean of <g, U> over the next one and three steps

One line a task and start: the correlation with the large probe over windows and seeds, the mean difference to it
(bias) and its standard deviation, in units of the large probe's standard deviation; and the share of windows with the
same sign. No knob is moved.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from held import BEST
from search_parts.contender import update
from search_parts.found import all_tasks
from search_parts.task import Problem, Task
from torch import Tensor, nn

from hdet.evidence import Line
from hdet.recipes.recommended import WARMUP
from hdet.replicas.tensors import clones
from hdet.schedules import LinearDecay
from hdet.windows import GrowingWindow

WIDTH = Line().width
"""How far the probe's two points lie from the window's end, in log rate."""
LARGE = 16
READ = 3
STARTS = (0.1, 1.0, 10.0)


@dataclass(frozen=True)
class Reading:
    """A window's slope, by the two probes, and by each of the next steps."""

    stop: int
    large: float
    probe: float
    steps: tuple[float, ...] = ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=sorted(BEST), default=["text_small", "ratings", "digits_conv"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--until", type=float, default=0.5, help="share of the run that is made")
    parser.add_argument("--csv", type=Path, help="where to write every reading")
    given = parser.parse_args()
    by_start: defaultdict[tuple[str, float], list[tuple[int, Reading]]] = defaultdict(list)
    title = "".join(f"{name:>30}" for name in ("probe", "step 1", f"steps 1 to {READ}"))
    print(f"{'':24}{title}\n{'task':14}{'start':>6}{'':4}" + "    corr.   bias    sd   sign" * 3)
    for name in given.tasks:
        for start in STARTS:
            for seed in range(given.seeds):
                by_start[name, start] += [(seed, one) for one in readings(all_tasks()[name], start, seed, given.until)]
            show(name, start, [one for _, one in by_start[name, start]])
    if given.csv is not None:
        with given.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["task", "start", "seed", "stop", "large_probe", "probe", *range(1, READ + 1)])
            for (name, start), told in by_start.items():
                for seed, one in told:
                    slopes = (one.large, one.probe, *one.steps)
                    writer.writerow([name, start, seed, one.stop, *(f"{slope:.6g}" for slope in slopes)])


def readings(task: Task, start: float, seed: int, until: float) -> Iterator[Reading]:
    """Every window's, until the training is no longer finite."""
    best = BEST[task.name]
    problem = task.problem(seed, best.dropout)
    model = problem.model()
    torch.manual_seed(seed)
    optimizer = task.optimizer(problem.groups(model), best)
    schedule = LinearDecay(peak=best.lr * start, total_steps=task.steps, warmup=WARMUP)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    first, windows = clones(parameters), GrowingWindow()
    moved: list[Tensor] = []
    closes, window = windows.length(0), 0
    reading: Reading | None = None
    for step in range(round(until * task.steps)):
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        loss = problem.loss(model, problem.batch(step))
        if not math.isfinite(loss.item()):
            return
        loss.backward()
        if reading is not None and len(reading.steps) < READ:
            pairs = zip(parameters, moved, strict=True)
            slope = sum(float((own.grad * along).sum()) for own, along in pairs if own.grad is not None)
            reading = replace(reading, steps=(*reading.steps, slope))
            if len(reading.steps) == READ:
                yield reading
        update(task, optimizer)
        if step + 1 == closes:
            moved = [own.detach() - before for own, before in zip(parameters, first, strict=True)]
            fresh = range(window, window + LARGE + 1)
            one, *many = [probed(problem, model, parameters, first, moved, index) for index in fresh]
            reading = Reading(closes, float(np.mean(many)), one)
            first, window = clones(parameters), fresh.stop
            closes += windows.length(closes)


@torch.no_grad()
def probed(
    problem: Problem,
    model: nn.Module,
    parameters: list[nn.Parameter],
    first: list[Tensor],
    moved: list[Tensor],
    index: int,
) -> float:
    """The slope by one probe batch; the weights are left as they were."""
    last = clones(parameters)
    model.eval()
    losses = []
    for x in (-WIDTH, WIDTH):
        for own, before, along in zip(parameters, first, moved, strict=True):
            own.copy_(before + math.exp(x) * along)
        losses.append(float(problem.example_losses(model, problem.probe(index)).mean()))
    for own, end in zip(parameters, last, strict=True):
        own.copy_(end)
    model.train()
    return (losses[1] - losses[0]) / (2 * WIDTH)


def show(name: str, start: float, told: list[Reading]) -> None:
    if len(told) < 2:
        print(f"{name:14}{start:5g}x{len(told):4}  too few windows", flush=True)
        return
    large = np.array([one.large for one in told])
    line = f"{name:14}{start:5g}x{len(told):4}"
    for slopes in (
        np.array([one.probe for one in told]),
        np.array([one.steps[0] for one in told]),
        np.array([np.mean(one.steps) for one in told]),
    ):
        error = (slopes - large) / large.std()
        line += f"{np.corrcoef(slopes, large)[0, 1]:+9.2f}{error.mean():+7.2f}{error.std():6.2f}"
        line += f"{np.mean(np.sign(slopes) == np.sign(large)):8.0%}"
    print(line, flush=True)


if __name__ == "__main__":
    main()
