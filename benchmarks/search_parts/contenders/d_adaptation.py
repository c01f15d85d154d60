"""D-Adaptation (Defazio and Mishchenko 2023, arXiv:2301.07733): the distance to the solution sets the step size."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from dataclasses import replace

from dadaptation import DAdaptAdam, DAdaptSGD

from hdet.schedules import Cosine
from search_parts.contender import Contender, Outcome, begin, train
from search_parts.meter import Meter
from search_parts.option import Option, named
from search_parts.task import Setting, Task


class DAdaptation(Contender):
    """lr = `factor` wherever the run starts, under the schedule that a set rate would have, as its authors ask.

    Decoupled decay with Adam; the task's betas or momentum.

    Args:
        factor: on the rate it finds; its `lr`.
    """

    order = 32

    def __init__(self, factor: float = 1.0) -> None:
        self.name = named("d_adaptation", factor, 1.0)  # type: ignore[misc]
        self.title = "D-Adaptation"  # type: ignore[misc]
        self.factor = factor

    def canonical(self, task: Task, setting: Setting) -> Setting:
        return replace(setting, lr=1.0)

    def run(self, task: Task, setting: Setting, seed: int, meter: Meter) -> Outcome:
        problem, model = begin(task, setting, seed, meter)
        groups = problem.groups(model)
        optimizer: DAdaptAdam | DAdaptSGD
        if task.family == "adamw":
            with redirect_stdout(io.StringIO()):  # it prints that its decay is decoupled
                optimizer = DAdaptAdam(groups, betas=task.betas, weight_decay=setting.decay, decouple=True)
        else:
            optimizer = DAdaptSGD(groups, momentum=task.momentum, weight_decay=setting.decay)
        schedule = Cosine(peak=self.factor, total_steps=task.steps, warmup=0.3)
        trained = train(task, problem, model, optimizer, task.steps, schedule)
        return Outcome(trained, problem, {"d": float(optimizer.param_groups[0]["d"])})


CONTENDER = DAdaptation()
OPTION = Option("lr", (DAdaptation(0.5), CONTENDER, DAdaptation(2.0)))
