"""Ray Tune's PBT scheduler, told scores by whoever trains the members; imported where Ray is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import PopulationBasedTraining


class RayPopulation(PopulationBasedTraining):  # type: ignore[misc]
    """The scheduler itself, in its synchronous mode; its trials and their controller stand still.

    Args:
        values: each member's first value.
        drawn: a value drawn anew.
        options: of `PopulationBasedTraining`.
    """

    def __init__(self, values: Sequence[float], drawn: Callable[[], float], **options: Any) -> None:
        super().__init__(
            time_attr="training_iteration",
            metric="loss",
            mode="min",
            perturbation_interval=1,
            hyperparam_mutations={"value": drawn},
            log_config=False,
            synch=True,
            **options,
        )
        self._members = [Member(number, value) for number, value in enumerate(values)]
        self._controller = SimpleNamespace(
            search_alg=None, get_trials=lambda: self._members, get_live_trials=lambda: self._members
        )
        self._rounds = 0
        self._sources: dict[int, int] = {}
        for member in self._members:
            self.on_trial_add(self._controller, member)

    @property
    def values(self) -> list[float]:
        """Each member's now."""
        return [member.config["value"] for member in self._members]

    def exploited(self, losses: Sequence[float]) -> dict[int, int]:
        """By each member that is to go on from another, which one that is. Its value is changed."""
        self._sources = {}
        self._rounds += 1
        for member, loss in zip(self._members, losses, strict=True):
            told = {"training_iteration": self._rounds, "loss": float(loss)}
            self.on_trial_result(self._controller, member, told)
        return self._sources

    def _get_new_config(self, trial: Any, trial_to_clone: Any) -> Any:
        self._sources[trial.number] = trial_to_clone.number
        return super()._get_new_config(trial, trial_to_clone)


class Member:
    """A paused trial with a checkpoint, as far as the scheduler looks at one."""

    status = Trial.PAUSED
    temporary_state = SimpleNamespace(saving_to=None)

    def __init__(self, number: int, value: float) -> None:
        self.number = number
        self.trial_id = self.experiment_tag = str(number)
        self.config = {"value": value}
        self.evaluated_params: dict[str, Any] = {}
        self.checkpoint = object()
        kept = SimpleNamespace(num_to_keep=None)
        self.run_metadata = SimpleNamespace(checkpoint_manager=SimpleNamespace(checkpoint_config=kept))

    def is_finished(self) -> bool:
        return False

    def set_experiment_tag(self, tag: str) -> None:
        self.experiment_tag = tag

    def set_config(self, config: dict[str, Any]) -> None:
        self.config = config
