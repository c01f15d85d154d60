"""Learning rates that a loop writes itself, known ahead by a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from hdet.errors import ConfigError
from hdet.overlay.told_schedule import copied, rates, require_own, shadow_of

AHEAD = 32
"""Values that a loop may have gone past since the last step, where it counts steps that a gradient scaler skipped."""

GROWING = 4
"""Steps on end, in each of which a loop has gone further ahead, that no skipped steps explain: it has other rates."""

NEAR = 1e-6
"""Rates that differ by so little, beside themselves or beside the highest, differ by rounding."""


class Foretold:
    """A function of the step, by which a loop writes its learning rates.

    The loop's count of steps runs ahead of the search's by steps that a gradient scaler skipped, or one behind it where
    rates are written after a step and not before it.

    Args:
        function: the optimizer step, counted from 0 where the search is attached, to the rate that the loop has written
            when it makes that step: one for all parameter groups, or a sequence of one for each.
        optimizer: whose groups the loop writes into.
        name: what it is called in messages.
        tick: optimizer steps between two values.
        kept: whether a search that goes on keeps the forecast of its checkpoint: what is asked now may have begun in
            mid-run.
    """

    steps_between = steps_each = 1
    steps_before = first = position = 0
    known_in_passes = False

    def __init__(
        self,
        function: Callable[[int], Any],
        optimizer: Optimizer,
        name: str | None = None,
        tick: int = 1,
        kept: bool = False,
    ) -> None:
        self.name = name or f"scheduler={getattr(function, '__qualname__', type(function).__name__)}"
        self.optimizer = optimizer
        self.tick = tick
        self.kept = kept
        self.ahead = 0
        """How far the loop's count is ahead of the search's."""
        self.under_way = bool(optimizer.state)
        self._placed_at = -1
        self._grown = 0  # so many steps on end
        self._function = function
        self._floor = 0.0

    @classmethod
    def by_timm(cls, scheduler: Any, optimizer: Optimizer, scheduler_every: int) -> Foretold:
        """One of timm's schedulers, which are told the number of the update, or of the epoch.

        Raises:
            ConfigError: it goes by epochs, and their length is not given, or by updates, and one is; it waits for a
                metric, steps another optimizer, or cannot be copied.
        """
        require_own(scheduler, optimizer)
        name, by_epochs = type(scheduler).__name__, bool(scheduler.t_in_epochs)
        if hasattr(scheduler, "lr_scheduler"):
            raise ConfigError(f"timm's {name} waits for a metric, so nobody knows where it goes; give schedule=None")
        if by_epochs and scheduler_every == 1:
            raise ConfigError(f"timm's {name} goes by epochs; give scheduler_every=, the optimizer steps of an epoch")
        if not by_epochs and scheduler_every > 1:
            raise ConfigError(f"timm's {name} goes by updates; leave out scheduler_every=, which is for epochs")
        shadow = shadow_of(optimizer, optimizer.param_groups)
        ahead = copied(scheduler, {id(scheduler.optimizer): shadow})
        begun = rates(shadow)

        def foretold(step: int) -> list[float]:
            if step < scheduler_every:
                return begun  # before it is told of an update
            (ahead.step if by_epochs else ahead.step_update)(step // scheduler_every)
            return rates(shadow)

        return cls(foretold, optimizer, f"timm's {name}", tick=scheduler_every, kept=True)

    def forecast(
        self, total_steps: int, groups: Sequence[Mapping[str, Any]], read: Callable[[Optimizer], list[float]]
    ) -> list[list[float]]:
        """The rates of all groups, by step.

        Raises:
            ConfigError: the function gives something else than a rate of 0 or more, or one for each group; or other
                rates when it is asked again; or writes into the optimizer.
        """
        held = [group["lr"] for group in self.optimizer.param_groups]
        try:
            rows = [self._row(step, len(groups)) for step in range(total_steps)]
            again = self._row(0, len(groups))
            wrote = any(group["lr"] is not rate for group, rate in zip(self.optimizer.param_groups, held, strict=True))
        finally:
            for group, rate in zip(self.optimizer.param_groups, held, strict=True):
                group["lr"] = rate
        if wrote:
            raise ConfigError(
                f"{self.name} writes into the optimizer; hdet asks it for all steps beforehand, so give a function "
                f"that only tells the rate of a step"
            )
        if again != rows[0]:
            raise ConfigError(
                f"{self.name} gives other rates when it is asked for step 0 again, so it keeps a count of its own; "
                f"make it a function of the step alone"
            )
        self._floor = NEAR * max(max(row) for row in rows)
        return rows

    def resume(self, simulated_at: int, ahead: int) -> None:
        """Go on from a checkpoint, in which the loop's count was so far ahead."""
        self.ahead = ahead

    def position_at(self, step: int) -> int:
        """Where in the forecast the optimizer is to stand as it makes a step."""
        return max(0, step + self.ahead)

    def place(self, step: int, held: Sequence[float], rows: Sequence[Sequence[float]]) -> int | None:
        """Where in the forecast the optimizer stands as it makes a step; None where nothing near is what it holds."""
        expected = self.position_at(step)
        passed = 0
        for position in range(expected, len(rows)):
            if self._alike(held, rows[position]):
                return position if self._goes_ahead(step, position - step) else None
            passed += position == expected or rows[position] != rows[position - 1]  # a plateau counts as one
            if passed > AHEAD:
                break
        if expected >= len(rows) - 1 or (self.ahead > 0 and passed <= AHEAD):
            return expected  # the loop has counted past the end
        if self.ahead == 0 and step >= self.tick and self._alike(held, rows[step - self.tick]):
            self.ahead = -self.tick
            return step - self.tick
        return None

    def _goes_ahead(self, step: int, ahead: int) -> bool:
        """Whether the loop may be so far ahead; a step that is made again, as skipped by a scaler, counts once."""
        if step != self._placed_at:
            self._grown = self._grown + 1 if ahead > self.ahead else 0
        self._placed_at, self.ahead = step, ahead
        return self._grown < GROWING

    def complaint(self, step: int, held: Sequence[float], expected: Sequence[float]) -> str:
        """What is said where the optimizer holds something else."""
        return (
            f"the learning rates at step {step} are {held}, where {self.name} foretold {expected}; what is given as "
            f"scheduler= is asked for the rates that the loop has written when it makes that optimizer step, counted "
            f"from 0 at hdet.attach. Where training was under way, load the search's state too, or give a function "
            f"that counts from there; schedule=None follows whatever comes"
        )

    def _alike(self, held: Sequence[float], row: Sequence[float]) -> bool:
        pairs = zip(held, row, strict=True)
        return all(math.isclose(one, other, rel_tol=NEAR, abs_tol=self._floor) for one, other in pairs)

    def _row(self, step: int, groups: int) -> list[float]:
        try:
            given = self._function(step)
        except Exception as error:
            raise ConfigError(
                f"{self.name} is asked for the rate of each step of the run, and raised "
                f"{type(error).__name__} for step {step}: {error}"
            ) from error
        row = _numbers(given, groups)
        if len(row) != groups or not all(math.isfinite(rate) and rate >= 0.0 for rate in row):
            raise ConfigError(
                f"{self.name} gives {given!r} for step {step}; it is asked for the learning rate that the "
                f"loop writes, a number of at least 0 for all parameter groups, or a list of {groups}, one for each"
            )
        return row


def _numbers(given: Any, groups: int) -> list[float]:
    """Rates as floats, one for each group; none where they are no numbers."""
    if isinstance(given, (Tensor, np.ndarray)):
        given = given.tolist()
    try:
        row = groups * [given] if isinstance(given, (Real, np.number)) else list(given)
        return [] if isinstance(given, str) else [float(rate) for rate in row]
    except (TypeError, ValueError):
        return []


def of_timm(scheduler: Any) -> bool:
    """Whether it is one of timm's schedulers, or is called as they are."""
    return callable(getattr(scheduler, "step_update", None)) and hasattr(scheduler, "t_in_epochs")
