"""DoG (Ivgi, Hinder and Carmon 2023, arXiv:2302.12022): steps of the distance moved over the gradients' root sum."""

from __future__ import annotations

from dataclasses import replace

from dog import DoG, PolynomialDecayAverager

from search_parts.contender import Contender, Outcome, begin, update
from search_parts.meter import Meter
from search_parts.task import Setting, Task


class DistanceOverGradients(Contender):
    """SGD without momentum or schedule, judged at its averaged weights: `reps_rel` 1e-6 and gamma 8, its defaults.

    Weight decay as it was given: DoG adds it to the gradient.
    """

    name = "dog"
    title = "DoG"
    order = 33

    def canonical(self, task: Task, setting: Setting) -> Setting:
        return replace(setting, lr=1.0)

    def run(self, task: Task, setting: Setting, seed: int, meter: Meter) -> Outcome:
        problem, model = begin(task, setting, seed, meter)
        optimizer = DoG(problem.groups(model), weight_decay=setting.decay)
        averager = PolynomialDecayAverager(model)
        for step in range(task.steps):
            problem.loss(model, problem.batch(step)).backward()
            update(task, optimizer)
            averager.step()
        return Outcome(averager.averaged_model, problem)


CONTENDER = DistanceOverGradients()
