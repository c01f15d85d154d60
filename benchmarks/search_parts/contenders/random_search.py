"""Random search: several short runs in one run's budget, the best of which is the result."""

from __future__ import annotations

from search_parts.contender import Contender, Outcome
from search_parts.meter import Meter
from search_parts.task import Setting, Task
from search_parts.trials import best_trial, unsearched

TRIALS = 4


class RandomSearch(Contender):
    """Four settings drawn from the ranges of the task's sweep, each trained for a quarter of the budget.

    What the sweep does not vary stays as the run was given it.
    """

    name = "random_search"
    title = "random search, 4 runs of 1/4"
    order = 20

    def canonical(self, task: Task, setting: Setting) -> Setting:
        return unsearched(task, setting)

    def run(self, task: Task, setting: Setting, seed: int, meter: Meter) -> Outcome:
        best = best_trial(task, setting, seed, meter, trials=TRIALS, budget=task.budget)
        return Outcome(best.model, best.problem, {"lr": best.setting.lr})


CONTENDER = RandomSearch()
