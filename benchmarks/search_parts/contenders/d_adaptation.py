"""D-Adaptation (Defazio and Mishchenko 2023, arXiv:2301.07733): the distance to the solution sets the step size."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from dataclasses import replace

from dadaptation import DAdaptAdam, DAdaptSGD

from hdet.schedules import Cosine
from search_parts.contender import Contender, Outcome, begin, train
from search_parts.meter import Meter
from search_parts.task import Setting, Task


class DAdaptation(Contender):
    """lr = 1 wherever the run starts, under the schedule that a run with a set rate would have, as its authors ask.

    Decoupled decay with Adam; the task's betas or momentum.
    """

    name = "d_adaptation"
    title = "D-Adaptation"
    order = 32

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
        schedule = Cosine(peak=1.0, total_steps=task.steps, warmup=0.3)
        trained = train(task, problem, model, optimizer, task.steps, schedule)
        return Outcome(model if trained else None, problem, {"d": float(optimizer.param_groups[0]["d"])})


CONTENDER = DAdaptation()
