"""A schedule that falls slower or faster than it was given."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hdet.hparams.schedule import Schedule


@dataclass(frozen=True)
class Bend:
    """From step `since` on, a schedule's value v is v exp(offset) (v / v(since))^(power - 1).

    So it goes on from where it is, and what is left of its fall is the given one to a power: below 1 it stays high
    for longer and ends steeper, above 1 the other way round.

    Attributes:
        since: the step from which on the power is in force.
        power: of the schedule; 1 as given.
        offset: how far the value at `since` lies above the schedule as given, in its logarithm.
    """

    since: int = 0
    power: float = 1.0
    offset: float = 0.0

    def of(self, schedule: Schedule, step: int) -> float:
        """The value at a step.

        >>> from hdet.schedules import LinearDecay
        >>> line = LinearDecay(1.0, total_steps=10, warmup=0.1)
        >>> [round(Bend(since=1, power=0.5).of(line, step), 3) for step in (1, 5, 9)]
        [1.0, 0.745, 0.333]
        """
        value = schedule(step)
        if self.power == 1.0 and self.offset == 0.0:
            return value
        anchor = schedule(self.since)
        if value <= 0.0 or anchor <= 0.0:
            return value
        return value * math.exp(self.offset + (self.power - 1.0) * math.log(value / anchor))

    def to(self, power: float, schedule: Schedule, step: int) -> Bend:
        """With another power from a step on, without a jump there."""
        value = schedule(step)
        return Bend(step, power, math.log(self.of(schedule, step) / value) if value > 0.0 else self.offset)
