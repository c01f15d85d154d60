"""Learning rates that a loop writes itself, known ahead by a function of the step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch.optim import Optimizer

from hdet.errors import ConfigError
from hdet.overlay.told_schedule import require_own, shadow_of

MOST_SKIPPED = 32
"""Steps on end that a gradient scaler may skip while the loop goes on counting."""


class Foretold:
    """A function of the step, by which a loop writes its learning rates.

    Args:
        function: the optimizer step, counted from 0 where the search is attached, to the rate that the loop has written
            when it makes that step: one for all parameter groups, or a sequence of one for each.
    """

    steps_between = steps_each = 1
    steps_before = first = position = 0

    def __init__(self, function: Callable[[int], Any], name: str | None = None) -> None:
        self.function = function
        self.name = name or str(getattr(function, "__qualname__", type(function).__name__))

    @classmethod
    def by_timm(cls, scheduler: Any, optimizer: Optimizer, scheduler_every: int) -> Foretold:
        """One of timm's schedulers, which are told the number of the update, or of the epoch.

        Raises:
            ConfigError: it goes by epochs, and their length is not given; it waits for a metric, or steps another
                optimizer.
        """
        require_own(scheduler, optimizer)
        name = type(scheduler).__name__
        if hasattr(scheduler, "lr_scheduler"):
            raise ConfigError(f"timm's {name} waits for a metric, so nobody knows where it goes; give schedule=None")
        if scheduler.t_in_epochs and scheduler_every == 1:
            raise ConfigError(
                f"timm's {name} goes by epochs; give scheduler_every=, the optimizer steps of an epoch, or make it by "
                f"create_scheduler_v2(step_on_epochs=False)"
            )
        shadow = shadow_of(optimizer, optimizer.param_groups)
        ahead = copy.deepcopy(scheduler, {id(scheduler.optimizer): shadow})

        def rates(step: int) -> list[float]:
            if scheduler.t_in_epochs and step >= scheduler_every:
                ahead.step(step // scheduler_every)
            elif not scheduler.t_in_epochs and step:
                ahead.step_update(step)
            return [float(group["lr"]) for group in shadow.param_groups]

        return cls(rates, name)

    def forecast(
        self, total_steps: int, groups: Sequence[Mapping[str, Any]], read: Callable[[Optimizer], list[float]]
    ) -> list[list[float]]:
        """The rates of all groups, by step.

        Raises:
            ConfigError: the function gives something else than a rate of 0 or more, or one for each group.
        """
        return [self._row(step, len(groups)) for step in range(total_steps)]

    def place(self, held: Sequence[float], rows: Sequence[Sequence[float]], after: int, again: bool) -> int | None:
        """Where in the forecast the optimizer stands; None where nothing near is what it holds.

        Args:
            after: where it stood at the last step that was told.
            again: whether the same step is told once more.
        """
        first = after if again else after + 1
        near = range(first, first + MOST_SKIPPED + 1)
        return next((position for position in near if _alike(held, rows[min(position, len(rows) - 1)])), None)

    def _row(self, step: int, groups: int) -> list[float]:
        given = self.function(step)
        try:
            rates = np.asarray(given, dtype=float)
        except (TypeError, ValueError):
            rates = np.array([])
        row: list[float] = rates.tolist() if rates.ndim == 1 else groups * [float(rates)] if rates.ndim == 0 else []
        if len(row) != groups or not all(math.isfinite(rate) and rate >= 0.0 for rate in row):
            raise ConfigError(
                f"scheduler={self.name} gives {given!r} for step {step}; it is asked for the learning rate that the "
                f"loop writes, a number of at least 0 for all parameter groups, or a list of {groups}, one for each"
            )
        return row


def of_timm(scheduler: Any) -> bool:
    """Whether it is one of timm's schedulers, or is called as they are."""
    return callable(getattr(scheduler, "step_update", None)) and hasattr(scheduler, "t_in_epochs")


def _alike(held: Sequence[float], row: Sequence[float]) -> bool:
    """Whether they are the same but for the rounding of a rate that is held as a float32 tensor."""
    return all(math.isclose(one, other, rel_tol=1e-6) for one, other in zip(held, row, strict=True))
