"""Ray Tune's ASHA scheduler, told losses by whoever trains the trials; imported where Ray is installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

from ray.tune.schedulers import ASHAScheduler, TrialScheduler

from search_parts.stopped_early import RUNGS
from search_parts.task import Setting


class RayHalving:
    """The scheduler itself, over settings that were drawn; its trials are numbers and stand still."""

    def __init__(self, settings: Sequence[Setting]) -> None:
        self.scheduler = ASHAScheduler(metric="loss", mode="min", max_t=RUNGS)
        self.settings: Iterator[Setting] = iter(settings)
        self.trials = 0

    def draw(self) -> Setting:
        self.trials += 1
        self.trial = SimpleNamespace(trial_id=str(self.trials))
        self.scheduler.on_trial_add(None, self.trial)
        return next(self.settings)

    def report(self, rung: int, loss: float) -> None:
        told = {"training_iteration": rung, "loss": loss}
        self.decision = self.scheduler.on_trial_result(None, self.trial, told)

    def stops(self) -> bool:
        return bool(self.decision == TrialScheduler.STOP)

    def ended(self, loss: float, complete: bool) -> None:
        self.scheduler.on_trial_remove(None, self.trial)
