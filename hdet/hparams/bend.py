"""A schedule that falls slower or faster than it was given."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Bend:
    """A schedule's value v becomes exp(log_factor) v^power.

    Below a power of 1 what is left of a fall stays high for longer and ends steeper, above 1 the other way round.

    Attributes:
        power: of the schedule; 1 as given.
        log_factor: in the logarithm of the knob's own unit; 0 as given.
    """

    power: float = 1.0
    log_factor: float = 0.0

    def of(self, value: float) -> float:
        """What a schedule's value becomes; one that is not positive stays as it is.

        >>> Bend(power=0.5).of(0.25)
        0.5
        """
        if (self.power == 1.0 and self.log_factor == 0.0) or value <= 0.0:
            return value
        return math.exp(self.log_factor + self.power * math.log(value))

    def to(self, power: float, value: float) -> Bend:
        """With another power, and without a jump where the schedule has this value.

        >>> Bend().to(0.5, 0.25).of(0.25)
        0.25
        """
        if power == self.power or value <= 0.0:
            return self
        return Bend(power, self.log_factor + (self.power - power) * math.log(value))
