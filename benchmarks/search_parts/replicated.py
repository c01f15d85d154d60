"""Four replicas under one engine, on one plain run's examples."""

from __future__ import annotations

from typing import ClassVar, Literal

import hdet
from hdet.controllers import Hold
from hdet.merges import Mean, Merge
from hdet.schedules import Cosine, Schedule
from hdet.spreads import TwoLevel
from search_parts.contender import Contender, Outcome, begin, step_replicas
from search_parts.meter import Meter
from search_parts.task import Problem, Setting, Task, split

REPLICAS = 4
WINDOWS = 12


def window_of(steps: int) -> int:
    """The length of a window of so many steps."""
    return max(1, steps // WINDOWS)


def windows_of(steps: int) -> int:
    """How many there are, a short one at the end included."""
    return -(-steps // window_of(steps))


class Replicated(Contender):
    """The replicas train 12 windows.

    Attributes:
        whole_runs: each takes whole batches, and a quarter of the steps; else a quarter of each batch, and all steps.
    """

    uses_library = True
    whole_runs: ClassVar[bool] = False
    gradients: ClassVar[Literal["shared", "local"]] = "local"

    def merge(self) -> Merge:
        """How the replicas become one."""
        return Mean()

    def knob(self, schedule: Schedule) -> hdet.LearningRate:
        """What is explored: nothing."""
        return hdet.LearningRate(schedule=schedule, spread=TwoLevel(0.0), controller=Hold())

    def steps(self, task: Task) -> int:
        """How many each replica makes within the budget."""
        return task.steps // REPLICAS if self.whole_runs else task.steps

    def objective(self, task: Task, problem: Problem) -> hdet.Objective | None:
        """For a merge that needs one."""
        return None

    def engine(
        self,
        replicas: hdet.replicas.Replicas,
        setting: Setting,
        steps: int,
        seed: int,
        objective: hdet.Objective | None = None,
    ) -> hdet.Engine:
        """What trains them, for a number of steps."""
        return hdet.Engine(
            replicas,
            [self.knob(Cosine(peak=setting.lr, total_steps=steps, warmup=0.3))],
            window=window_of(steps),
            merge=self.merge(),
            gradients=self.gradients,
            total_steps=steps,
            seed=seed,
            objective=objective,
        )

    def run(self, task: Task, setting: Setting, seed: int, meter: Meter) -> Outcome:
        problem, model = begin(task, setting, seed, meter)
        optimizer = task.optimizer(problem.groups(model), setting)
        steps, objective = self.steps(task), self.objective(task, problem)
        engine = self.engine(hdet.replicate(model, optimizer, n=REPLICAS), setting, steps, seed, objective)
        for step in range(steps):
            if self.whole_runs:
                batches = [problem.batch(REPLICAS * step + index) for index in range(REPLICAS)]
            else:
                batches = split(problem.batch(step), REPLICAS)
            step_replicas(task, engine, problem.loss, batches)
        return Outcome(engine.replicas[0].model, problem)
