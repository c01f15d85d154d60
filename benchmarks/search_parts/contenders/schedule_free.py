"""Schedule-Free AdamW and SGD (Defazio et al. 2024, arXiv:2405.15682): averaging in place of a schedule."""

from __future__ import annotations

import schedulefree

from search_parts.contender import Contender, Outcome, begin, train
from search_parts.meter import Meter
from search_parts.option import Option, named
from search_parts.task import Setting, Task

WARMUP = 0.05


class ScheduleFree(Contender):
    """The task's family of optimizers, 5 % warm-up.

    SGD's rate is divided by 1 - momentum: Schedule-Free's momentum, unlike SGD's, does not enlarge steps.

    Args:
        factor: on the given rate, as its authors find that it wants another than a run with a schedule.
    """

    order = 31

    def __init__(self, factor: float = 1.0) -> None:
        self.name = named("schedule_free", factor, 1.0)  # type: ignore[misc]
        self.title = "Schedule-Free"  # type: ignore[misc]
        self.factor = factor

    def run(self, task: Task, setting: Setting, seed: int, meter: Meter) -> Outcome:
        problem, model = begin(task, setting, seed, meter)
        groups = problem.groups(model)
        warmup = round(WARMUP * task.steps)
        optimizer: schedulefree.AdamWScheduleFree | schedulefree.SGDScheduleFree
        if task.family == "adamw":
            optimizer = schedulefree.AdamWScheduleFree(
                groups, lr=self.factor * setting.lr, betas=task.betas, weight_decay=setting.decay, warmup_steps=warmup
            )
        else:
            optimizer = schedulefree.SGDScheduleFree(
                groups,
                lr=self.factor * setting.lr / (1 - task.momentum),
                momentum=task.momentum,
                weight_decay=setting.decay,
                warmup_steps=warmup,
            )
        optimizer.train()
        trained = train(task, problem, model, optimizer, task.steps)
        optimizer.eval()
        return Outcome(trained, problem)


CONTENDER = ScheduleFree()
OPTION = Option("factor on the rate", (ScheduleFree(1 / 3), CONTENDER, ScheduleFree(3.0)))
