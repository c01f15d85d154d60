"""Half the budget to search, half to train: very short runs choose the setting of a longer one."""

from __future__ import annotations

from hdet.schedules import Cosine
from search_parts.contender import Contender, Outcome, begin, train
from search_parts.meter import Meter
from search_parts.task import Setting, Task
from search_parts.trials import best_trial, unsearched

TRIALS = 8


class SearchThenTrain(Contender):
    """Eight random settings, 1/16 of the budget each; the best is trained anew with the half that is left."""

    name = "search_then_train"
    title = "random search (8 of 1/16), then 1/2"
    order = 21

    def canonical(self, task: Task, setting: Setting) -> Setting:
        return unsearched(task, setting)

    def run(self, task: Task, setting: Setting, seed: int, meter: Meter) -> Outcome:
        best = best_trial(task, setting, seed, meter, trials=TRIALS, budget=task.budget // 2)
        chosen = best.setting
        problem, model = begin(task, chosen, seed, meter)
        optimizer = task.optimizer(problem.groups(model), chosen)
        steps = (task.budget - meter.passes) // (3 * task.batch)
        trained = train(task, problem, model, optimizer, steps, Cosine(peak=chosen.lr, total_steps=steps, warmup=0.3))
        return Outcome(trained, problem, {"lr": chosen.lr})


CONTENDER = SearchThenTrain()
