"""Schedule-Free AdamW and SGD (Defazio et al. 2024, arXiv:2405.15682): averaging in place of a schedule."""

from __future__ import annotations

import schedulefree

from search_parts.contender import Contender, Outcome, begin, train
from search_parts.meter import Meter
from search_parts.task import Setting, Task

WARMUP = 0.05


class ScheduleFree(Contender):
    """The task's family of optimizers, 5 % warm-up.

    SGD's rate is divided by 1 - momentum: Schedule-Free's momentum, unlike SGD's, does not enlarge steps.
    """

    name = "schedule_free"
    title = "Schedule-Free"
    order = 31

    def run(self, task: Task, setting: Setting, seed: int, meter: Meter) -> Outcome:
        problem, model = begin(task, setting, seed, meter)
        groups = problem.groups(model)
        warmup = round(WARMUP * task.steps)
        optimizer: schedulefree.AdamWScheduleFree | schedulefree.SGDScheduleFree
        if task.family == "adamw":
            optimizer = schedulefree.AdamWScheduleFree(
                groups, lr=setting.lr, betas=task.betas, weight_decay=setting.decay, warmup_steps=warmup
            )
        else:
            optimizer = schedulefree.SGDScheduleFree(
                groups,
                lr=setting.lr / (1 - task.momentum),
                momentum=task.momentum,
                weight_decay=setting.decay,
                warmup_steps=warmup,
            )
        optimizer.train()
        trained = train(task, problem, model, optimizer, task.steps)
        optimizer.eval()
        return Outcome(model if trained else None, problem)


CONTENDER = ScheduleFree()
