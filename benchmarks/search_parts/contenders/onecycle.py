"""A fixed OneCycle schedule, at torch's defaults."""

from __future__ import annotations

import hdet
from search_parts.contender import Contender, Outcome, begin, train
from search_parts.meter import Meter
from search_parts.task import Setting, Task


class FixedOneCycle(Contender):
    """torch.optim.lr_scheduler.OneCycleLR's learning rates; momentum is left alone."""

    name = "onecycle"
    title = "fixed OneCycle"
    order = 11
    adaptive = False

    def run(self, task: Task, setting: Setting, seed: int, meter: Meter) -> Outcome:
        problem, model = begin(task, setting, seed, meter)
        optimizer = task.optimizer(problem.groups(model), setting)
        schedule = hdet.OneCycle(setting.lr, total_steps=task.steps)
        trained = train(task, problem, model, optimizer, task.steps, schedule)
        return Outcome(model if trained else None, problem)


CONTENDER = FixedOneCycle()
