"""Optuna's searches."""

from __future__ import annotations

import math
from collections.abc import Callable

import optuna

from search_parts.stopped_early import StoppedEarly
from search_parts.task import Setting, Task


class OptunaSearch(StoppedEarly):
    """A study of Optuna.

    Args:
        sampler: draws settings, by the seed. pruner: stops trials; the last of its resources is `RUNGS`.
    """

    def __init__(
        self,
        name: str,
        title: str,
        sampler: Callable[[int], optuna.samplers.BaseSampler],
        pruner: Callable[[], optuna.pruners.BasePruner],
    ) -> None:
        self.name, self.title = name, title  # type: ignore[misc]
        self.sampler, self.pruner = sampler, pruner

    def search(self, task: Task, given: Setting, seed: int) -> Trials:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study = optuna.create_study(
            study_name=f"{task.name} {seed}",  # by whose hash Hyperband shares trials out
            sampler=self.sampler(seed),
            pruner=self.pruner(),
        )
        return Trials(study, task, given)


class Trials:
    """Of a study, which is asked for one at a time."""

    def __init__(self, study: optuna.Study, task: Task, given: Setting) -> None:
        self.study, self.task, self.given = study, task, given

    def draw(self) -> Setting:
        self.trial = self.study.ask()
        grid = self.task.grid
        lr = self.trial.suggest_float("lr", min(grid.lrs), max(grid.lrs), log=True)
        decay, dropout = self.given.decay, self.given.dropout
        if len(grid.decays) > 1:
            decay = self.trial.suggest_float("decay", min(grid.decays), max(grid.decays), log=True)
        if len(grid.dropouts) > 1:
            dropout = self.trial.suggest_float("dropout", min(grid.dropouts), max(grid.dropouts))
        return Setting(lr, decay, dropout)

    def report(self, rung: int, loss: float) -> None:
        self.trial.report(loss, rung)

    def stops(self) -> bool:
        return self.trial.should_prune()

    def ended(self, loss: float, complete: bool) -> None:
        states = optuna.trial.TrialState
        state = states.COMPLETE if complete else states.PRUNED if math.isfinite(loss) else states.FAIL
        self.study.tell(self.trial, loss if complete else None, state=state)
