"""Plain training under a fixed schedule of the learning rate."""

from __future__ import annotations

from abc import abstractmethod

from hdet.schedules import Schedule
from search_parts.contender import Contender, Outcome, begin, train
from search_parts.meter import Meter
from search_parts.task import Setting, Task


class Fixed(Contender):
    """Nothing is searched: the setting a run begins with is the setting it ends with."""

    adaptive = False

    @abstractmethod
    def schedule(self, peak: float, steps: int) -> Schedule:
        """The learning rate by step."""

    def run(self, task: Task, setting: Setting, seed: int, meter: Meter) -> Outcome:
        problem, model = begin(task, setting, seed, meter)
        optimizer = task.optimizer(problem.groups(model), setting)
        trained = train(task, problem, model, optimizer, task.steps, self.schedule(setting.lr, task.steps))
        return Outcome(trained, problem)
