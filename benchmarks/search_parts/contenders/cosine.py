"""A fixed cosine schedule with 30 % warm-up: the base schedule that hdet is given, and nothing else."""

from __future__ import annotations

import hdet
from search_parts.contender import Contender, Outcome, begin, train
from search_parts.meter import Meter
from search_parts.task import Setting, Task


class FixedCosine(Contender):
    """What is swept for the oracle, too."""

    name = "cosine"
    title = "fixed cosine"
    order = 10
    adaptive = False

    def run(self, task: Task, setting: Setting, seed: int, meter: Meter) -> Outcome:
        problem, model = begin(task, setting, seed, meter)
        optimizer = task.optimizer(problem.groups(model), setting)
        schedule = hdet.Cosine(peak=setting.lr, total_steps=task.steps, warmup=0.3)
        trained = train(task, problem, model, optimizer, task.steps, schedule)
        return Outcome(model if trained else None, problem)


CONTENDER = FixedCosine()
