"""Optuna's searches: many settings begun, the worse ones stopped early, within one run's budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import optuna
from torch import nn

from hdet.schedules import Cosine
from search_parts.contender import Contender, Outcome, begin, update
from search_parts.meter import Meter
from search_parts.task import Problem, Setting, Task
from search_parts.trials import JUDGED_BY, held_out_loss, unsearched

RUNGS = 5
SHARE = 4


class OptunaSearch(Contender):
    """Settings from the ranges of the task's sweep; the best model at the end of the budget is the result.

    A trial is a run of a quarter of the budget under its own cosine, judged by the held-out loss at five points of it.

    Args:
        sampler: draws settings, by the seed. pruner: stops trials; the last of its resources is `RUNGS`.
    """

    order = 22

    def __init__(
        self,
        name: str,
        title: str,
        sampler: Callable[[int], optuna.samplers.BaseSampler],
        pruner: Callable[[], optuna.pruners.BasePruner],
    ) -> None:
        self.name, self.title = name, title  # type: ignore[misc]
        self.sampler, self.pruner = sampler, pruner

    def canonical(self, task: Task, setting: Setting) -> Setting:
        return unsearched(task, setting)

    def run(self, task: Task, setting: Setting, seed: int, meter: Meter) -> Outcome:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        steps = task.steps // SHARE
        study = optuna.create_study(
            study_name=f"{task.name} {seed}",  # by whose hash Hyperband shares trials out
            sampler=self.sampler(seed),
            pruner=self.pruner(),
        )
        best: tuple[float, Problem, nn.Module | None, Setting] = (math.inf, task.problem(seed, 0.0), None, setting)
        every = -(-steps // RUNGS)
        while meter.passes + 3 * task.batch * every <= task.budget:
            trial = study.ask()
            drawn = _drawn(trial, task, setting)
            problem, model = begin(task, drawn, seed, meter)
            loss, done = _trained(trial, task, problem, model, drawn, steps, every, meter)
            study.tell(trial, loss if done else None, state=_state(loss, done))
            if loss < best[0]:
                best = loss, problem, model, drawn
        return Outcome(best[2], best[1], {"lr": best[3].lr, "trials": len(study.trials)})


def _drawn(trial: optuna.Trial, task: Task, given: Setting) -> Setting:
    grid = task.grid
    lr = trial.suggest_float("lr", min(grid.lrs), max(grid.lrs), log=True)
    decay, dropout = given.decay, given.dropout
    if len(grid.decays) > 1:
        decay = trial.suggest_float("decay", min(grid.decays), max(grid.decays), log=True)
    if len(grid.dropouts) > 1:
        dropout = trial.suggest_float("dropout", min(grid.dropouts), max(grid.dropouts))
    return Setting(lr, decay, dropout)


def _trained(
    trial: optuna.Trial,
    task: Task,
    problem: Problem,
    model: nn.Module,
    setting: Setting,
    steps: int,
    every: int,
    meter: Meter,
) -> tuple[float, bool]:
    """The held-out loss where the trial ended, and whether that is its end."""
    optimizer = task.optimizer(problem.groups(model), setting)
    schedule = Cosine(peak=setting.lr, total_steps=steps, warmup=0.3)
    loss = math.inf
    for step in range(steps):
        if meter.passes + 3 * task.batch + JUDGED_BY > task.budget:
            return loss, False
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        problem.loss(model, problem.batch(step)).backward()
        update(task, optimizer)
        if (step + 1) % every == 0 or step == steps - 1:
            loss = held_out_loss(problem, model)
            if not math.isfinite(loss):
                return math.inf, False
            trial.report(loss, -(-(step + 1) // every))
            if step < steps - 1 and trial.should_prune():
                return loss, False
    return loss, True


def _state(loss: float, done: bool) -> Any:
    states = optuna.trial.TrialState
    return states.COMPLETE if done else states.PRUNED if math.isfinite(loss) else states.FAIL
