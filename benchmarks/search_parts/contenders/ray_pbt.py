"""Ray Tune's population based training: four members, each a quarter of the budget."""

from __future__ import annotations

import math
import random

import numpy as np

from hdet.errors import MissingExtraError
from hdet.replicas.in_process import transplant, twin
from hdet.schedules import Cosine
from search_parts.contender import Contender, Outcome, begin, update
from search_parts.meter import Meter
from search_parts.replicated import REPLICAS, WINDOWS
from search_parts.task import Setting, Task

SPREAD = 1.5
"""First values lie up to this far from the given rate, in natural logarithms: as those of `population`."""


class RayPBT(Contender):
    """Ray's scheduler over members in this process; members, windows, first rates and losses as of `population`.

    Values are multiplied by 1.2 or 0.8, or drawn anew with probability 0.25, as Ray does by default. At the end the
    member with the least training loss over the last window is the result.
    """

    name = "ray_pbt"
    title = "Ray Tune's PBT, 4 members of 1/4"
    order = 42
    needs = "ray"

    def run(self, task: Task, setting: Setting, seed: int, meter: Meter) -> Outcome:
        try:
            from search_parts.ray_population import RayPopulation
        except ImportError:
            raise MissingExtraError("ray", "ray") from None
        random.seed(seed)  # which Ray's scheduler draws from
        rng = np.random.default_rng(seed)
        population = RayPopulation(
            np.exp(np.linspace(-SPREAD, SPREAD, REPLICAS)).tolist(),
            lambda: float(np.exp(rng.uniform(-SPREAD, SPREAD))),
        )
        problem, model = begin(task, setting, seed, meter)
        first = (model, task.optimizer(problem.groups(model), setting))
        members = [first, *(twin(*first) for _ in range(REPLICAS - 1))]
        steps = task.steps // REPLICAS
        schedule, window = Cosine(peak=setting.lr, total_steps=steps, warmup=0.3), max(1, steps // WINDOWS)
        losses: list[list[float]] = [[] for _ in members]
        for step in range(steps):
            for index, (member, optimizer) in enumerate(members):
                for group in optimizer.param_groups:
                    group["lr"] = population.values[index] * schedule(step)
                loss = problem.loss(member, problem.batch(REPLICAS * step + index))
                loss.backward()
                update(task, optimizer)
                losses[index].append(float(loss.detach()))
            if (step + 1) % window == 0 or step + 1 == steps:
                means = [float(np.mean(own)) for own in losses]
                means = [mean if math.isfinite(mean) else math.inf for mean in means]
                if step + 1 < steps:
                    for index, source in population.exploited(means).items():
                        transplant(members[source], members[index])
                    losses = [[] for _ in members]
        best = int(np.argmin(means))
        trained = members[best][0] if math.isfinite(means[best]) else None
        return Outcome(trained, problem, {"factor": population.values[best]})


CONTENDER = RayPBT()
