"""Short trials of random settings, and the best of them by held-out loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from hdet.replicas.tensors import evaluating
from hdet.schedules import Cosine
from search_parts.contender import begin, train
from search_parts.meter import Meter
from search_parts.task import Problem, Setting, Task

JUDGED_BY = 128


@dataclass(frozen=True)
class Trial:
    """A trained setting; no model if it failed."""

    setting: Setting
    problem: Problem
    model: nn.Module | None
    loss: float


def draw(task: Task, given: Setting, seed: int, count: int) -> list[Setting]:
    """Settings from the ranges of the task's sweep: rates and decays log-uniform, dropout uniform.

    What the sweep holds at one value is left as given.
    """
    rng = np.random.default_rng([seed, 7])
    grid = task.grid

    def log_uniform(values: tuple[float, ...]) -> float:
        return math.exp(rng.uniform(math.log(min(values)), math.log(max(values))))

    drawn = []
    for _ in range(count):
        lr = log_uniform(grid.lrs)
        decay = log_uniform(grid.decays) if len(grid.decays) > 1 else given.decay
        dropout = (
            float(rng.uniform(min(grid.dropouts), max(grid.dropouts))) if len(grid.dropouts) > 1 else given.dropout
        )
        drawn.append(Setting(lr, decay, dropout))
    return drawn


def unsearched(task: Task, setting: Setting) -> Setting:
    """The setting with all that is searched set to a value that says nothing."""
    grid = task.grid
    return Setting(
        lr=grid.lrs[0],
        decay=grid.decays[0] if len(grid.decays) > 1 else setting.decay,
        dropout=grid.dropouts[0] if len(grid.dropouts) > 1 else setting.dropout,
    )


def best_trial(task: Task, given: Setting, seed: int, meter: Meter, *, trials: int, budget: int) -> Trial:
    """The best of some random settings, each with an equal part of a budget that pays for the judging too."""
    best: Trial | None = None
    for setting in draw(task, given, seed, trials):
        problem, model = begin(task, setting, seed, meter)
        steps = max(1, (budget // trials - examples_judged_by(problem)) // (3 * task.batch))
        optimizer = task.optimizer(problem.groups(model), setting)
        schedule = Cosine(peak=setting.lr, total_steps=steps, warmup=0.3)
        trained = train(task, problem, model, optimizer, steps, schedule)
        loss = held_out_loss(problem, trained)
        if best is None or loss < best.loss:
            best = Trial(setting, problem, trained if loss < math.inf else None, loss)
    assert best is not None
    return best


def held_out_loss(problem: Problem, model: nn.Module | None) -> float:
    """The mean loss on `examples_judged_by` held-out examples, in eval mode; infinite where not finite, or no model."""
    if model is None:
        return math.inf
    with evaluating(model), torch.no_grad():
        loss = float(torch.stack([problem.example_losses(model, batch).mean() for batch in _probes(problem)]).mean())
    return loss if math.isfinite(loss) else math.inf


def examples_judged_by(problem: Problem) -> int:
    """How many they are: at least `JUDGED_BY`, in whole probes."""
    return sum(_examples(batch) for batch in _probes(problem))


def _probes(problem: Problem) -> list[Any]:
    first = problem.probe(0)
    return [first, *(problem.probe(number) for number in range(1, -(-JUDGED_BY // _examples(first))))]


def _examples(batch: Any) -> int:
    return len(batch[0] if isinstance(batch, tuple) else batch)
