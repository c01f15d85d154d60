"""DoG (Ivgi, Hinder and Carmon 2023, arXiv:2302.12022): steps of the distance moved over the gradients' root sum."""

from __future__ import annotations

from dataclasses import replace

from dog import DoG, PolynomialDecayAverager

from search_parts.contender import Contender, Outcome, begin, update
from search_parts.meter import Meter
from search_parts.option import Option, named
from search_parts.task import Setting, Task


class DistanceOverGradients(Contender):
    """SGD without momentum or schedule, judged at its averaged weights: gamma 8, its default.

    Weight decay as it was given: DoG adds it to the gradient.

    Args:
        reps_rel: the first step's length, relative to the weights'.
    """

    order = 33

    def __init__(self, reps_rel: float = 1e-6) -> None:
        self.name = named("dog", reps_rel, 1e-6)  # type: ignore[misc]
        self.title = "DoG"  # type: ignore[misc]
        self.reps_rel = reps_rel

    def canonical(self, task: Task, setting: Setting) -> Setting:
        return replace(setting, lr=1.0)

    def run(self, task: Task, setting: Setting, seed: int, meter: Meter) -> Outcome:
        problem, model = begin(task, setting, seed, meter)
        optimizer = DoG(problem.groups(model), reps_rel=self.reps_rel, weight_decay=setting.decay)
        averager = PolynomialDecayAverager(model)
        for step in range(task.steps):
            problem.loss(model, problem.batch(step)).backward()
            update(task, optimizer)
            averager.step()
        return Outcome(averager.averaged_model, problem)


CONTENDER = DistanceOverGradients()
OPTION = Option("reps_rel", (DistanceOverGradients(1e-8), CONTENDER, DistanceOverGradients(1e-4)))
