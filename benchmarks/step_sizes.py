"""How large are the steps of the best rates beside the weights? `Estimate.step_size` and `excess`, of tasks and sizes.

    python benchmarks/step_sizes.py

One window of each task by AdamW, at the rate that a sweep found best: the one that held.py has; for the large GPTs that
of docs/results/large_lengths.csv, on the CPU and with few sequences. Seed 0. What is told hangs on the first weights
and the rate, hardly on the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from held import BEST
from large_lengths import TASKS
from search_parts.contender import begin, step_replicas
from search_parts.contenders.recommended import Recommended
from search_parts.found import all_tasks
from search_parts.meter import Meter
from search_parts.task import Setting, Task, split
from torch import nn
from torch.optim import Optimizer

import hdet
from hdet.controllers import Hold
from hdet.evidence import Line

LARGE = {"10M": Setting(3e-3, 0.1), "125M": Setting(5e-4, 0.1)}


class AsGiven(Recommended):
    """The recipe with a rate that is entered as it was given, and held."""

    guard = None

    def knobs(self, model: nn.Module, optimizer: Optimizer, steps: int) -> list[hdet.Knob]:
        schedule = hdet.recipes.recommended.own_schedule(optimizer, steps)
        return [hdet.LearningRate(schedule=schedule, evidence=Line(), controller=Hold())]


def told(task: Task, setting: Setting) -> tuple[float | None, float | None]:
    """Step size, and the first weights' excess: what the first window tells."""
    problem, model = begin(task, setting, 0, Meter())
    probe = hdet.Probe(
        lambda model, batch: problem.example_losses(model, batch).view(task.sub_batches, -1).mean(dim=1),
        lambda window: [problem.probe(window)],
    )
    engine = AsGiven().engine(task, setting, problem, model, probe, task.steps, 0)
    while not engine.history.windows:
        step_replicas(task, engine, problem.loss, split(problem.batch(engine.step_count), task.micro_batches))
    first = engine.history.windows[0].estimates["learning_rate"]
    return first["step_size"], first["excess"]


def tasks() -> Iterator[tuple[Task, Setting]]:
    known = all_tasks()
    for name, setting in BEST.items():
        if known[name].family == "adamw":
            yield known[name], setting
    for name, setting in LARGE.items():
        yield replace(TASKS[name], device="cpu", batch=TASKS[name].sub_batches), setting


def main() -> None:
    print(f"{'task':16}{'best rate':>10}{'step size':>11}{'excess':>11}")
    for task, setting in tasks():
        size, excess = (float("nan") if own is None else own for own in told(task, setting))
        print(f"{task.name:16}{setting.lr:10g}{size:11.2f}{excess:11.2f}", flush=True)


if __name__ == "__main__":
    main()
