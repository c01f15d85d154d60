"""`hdet.find` for a tenth of the budget, then plain training at the rate it found with what is left."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import hdet
from hdet.errors import DivergedError
from hdet.schedules import Cosine
from search_parts.contender import Contender, Outcome, begin, train
from search_parts.meter import Meter
from search_parts.task import Setting, Task


class FindThenTrain(Contender):
    """The rate is found; decay and dropout stay as they were given. The trials' probes are charged too."""

    name = "find"
    title = "hdet find, then cosine"
    order = 2
    uses_library = True

    def run(self, task: Task, setting: Setting, seed: int, meter: Meter) -> Outcome:
        problem, model = begin(task, setting, seed, meter)

        def losses(model: nn.Module, batch: object) -> Tensor:
            return problem.example_losses(model, batch).view(task.sub_batches, -1).mean(dim=1)

        try:
            estimate = hdet.find(
                model,
                task.optimizer(problem.groups(model), setting),
                loss=problem.loss,
                batches=problem.batch,
                probe=hdet.Probe(losses, lambda window: [problem.probe(window)]),
                total_steps=task.steps,
                schedule=Cosine(peak=1.0, total_steps=task.steps, warmup=0.3),
                clip=task.clip,
                seed=seed,
            )
        except DivergedError:
            return Outcome(None, problem, {})
        torch.manual_seed(seed)
        steps = (task.budget - meter.passes) // (3 * task.batch)
        optimizer = task.optimizer(problem.groups(model), setting)
        schedule = Cosine(peak=self.rate(estimate), total_steps=steps, warmup=0.3)
        trained = train(task, problem, model, optimizer, steps, schedule)
        details = {
            "lr": estimate.learning_rate,
            "low": estimate.low,
            "high": estimate.high,
            "verdict": estimate.verdict,
        }
        return Outcome(trained, problem, details)

    def rate(self, estimate: hdet.trials.RateEstimate) -> float:
        """What the run is trained at. A variant is a subclass that overrides this."""
        return estimate.learning_rate


CONTENDER = FindThenTrain()
