"""Spaces: the coordinate in which a knob is moved, spread and measured.

A learning rate is right or wrong by a factor, a probability by its odds or its angle. A space turns a value
and a *shift* (a number in the space's coordinate, 0 at the value itself) into another value, and two values
into the shift between them:

| space | apply(v, s) | unit of s | domain |
|---|---|---|---|
| `Log` | v exp(s) | nats: s = 0.69 doubles | [0, inf) |
| `Logit` | expit(logit v + s) | nats of odds | [0, 1] |
| `Linear` | v + scale s | `scale` | the real line |
| `Relative` | v (1 + s) | fractions of v | [0, inf) |
| `Arcsine` | sin^2(arcsin sqrt v + s) | radians | [0, 1] |

Three laws hold for all: `apply(v, 0)` is `v` bit for bit; `apply` never leaves the domain; `difference`
inverts `apply` up to rounding, wherever the result is not on the edge of the domain.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

from pydantic import Field

from hdet.errors import ConfigError
from hdet.spec import Spec, register


class Space(Spec, family="space"):
    """How a value moves. A new space gives `domain`, `_apply` and `_difference`; the laws are kept here.

    `domain` is the closed interval of values the space knows; an infinite end admits every finite value.
    """

    domain: ClassVar[tuple[float, float]] = (-math.inf, math.inf)

    def apply(self, value: float, shift: float) -> float:
        """The value `shift` coordinate units away from `value`; `value` itself, bit for bit, at shift 0.

        A shift may be infinite; the result is then the limit, which is infinite where the domain is.

        Raises:
            ConfigError: the value is outside the domain, or the shift is not a number.
        """
        value, shift = self._inside(value), float(shift)
        if shift == 0.0:
            return value
        if math.isnan(shift):
            raise ConfigError(f"{type(self).__name__} cannot move {value!r} by a shift that is not a number")
        return self._apply(value, shift)

    def difference(self, value: float, origin: float) -> float:
        """The shift that takes `origin` to `value`: positive upwards, and +-inf where no finite shift does.

        `value` may be an infinite end of the domain, so that open bounds need no special case.

        Raises:
            ConfigError: either is outside the domain.
        """
        low, high = self.domain
        value = float(value)
        if not low <= value <= high:
            self._inside(value)
        origin = self._inside(origin)
        return 0.0 if value == origin else self._difference(value, origin)

    def room(self, value: float, bounds: tuple[float, float]) -> tuple[float, float]:
        """Coordinate distance from `value` (down to the lower bound, up to the upper bound), both >= 0.

        Infinite where no shift reaches the bound, 0 where the value is already at or beyond it.
        """
        low, high = bounds
        return max(0.0, -self.difference(low, value)), max(0.0, self.difference(high, value))

    def check(self, bounds: tuple[float, float]) -> None:
        """Accept the bounds of a knob that moves in this space.

        Raises:
            ConfigError: the bounds are reversed, equal, not numbers, or outside the domain.
        """
        low, high = bounds
        if not low < high:
            raise ConfigError(f"bounds must be (low, high) with low < high; got {bounds!r}")
        if not (self.domain[0] <= low and high <= self.domain[1]):
            raise ConfigError(
                f"bounds {bounds!r} reach outside {type(self).__name__}'s domain {self.domain}; "
                f"narrow the bounds or choose another space"
            )

    def _inside(self, value: float) -> float:
        value = float(value)
        if not (self.domain[0] <= value <= self.domain[1] and math.isfinite(value)):
            raise ConfigError(
                f"{value!r} is outside {type(self).__name__}'s domain {self.domain} (finite values only); "
                f"give another value or choose another space"
            )
        return value

    @abstractmethod
    def _apply(self, value: float, shift: float) -> float:
        """`apply` for a finite value in the domain and a shift that is neither 0 nor NaN."""

    @abstractmethod
    def _difference(self, value: float, origin: float) -> float:
        """`difference` for a finite origin and another value, both in the domain."""


@register
class Log(Space):
    """Factors: apply(v, s) = v exp(s). Zero stays zero, whatever the shift. For rates, decays, temperatures.

    >>> round(Log().apply(3e-4, 0.5), 7), Log().apply(0.0, 0.5)
    (0.0004946, 0.0)
    >>> Log().room(1.0, (0.0, 1.0))
    (inf, 0.0)
    """

    domain: ClassVar[tuple[float, float]] = (0.0, math.inf)

    def _apply(self, value: float, shift: float) -> float:
        if abs(shift) <= 700.0:
            return value * math.exp(shift)
        # exp would overflow, or be subnormal, although the product need not be: go in three steps. +-1500 is
        # farther than from the smallest positive double to the largest.
        third = math.exp(min(max(shift, -1500.0), 1500.0) / 3.0)
        return value * third * third * third

    def _difference(self, value: float, origin: float) -> float:
        if origin == 0.0:
            return math.inf
        if value == 0.0:
            return -math.inf
        if 0.5 < value / origin < 2.0:
            # value - origin is exact here (Sterbenz), so that small shifts keep their relative precision
            return math.log1p((value - origin) / origin)
        return math.log(value) - math.log(origin)


@register
class Logit(Space):
    """Odds: apply(v, s) = expit(logit v + s). 0 and 1 stay where they are. For probabilities inside (0, 1).

    >>> round(Logit().apply(0.5, 2.0), 4), Logit().apply(1.0, -2.0)
    (0.8808, 1.0)
    >>> round(Logit().difference(0.8, 0.5), 4)
    1.3863
    """

    domain: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def _apply(self, value: float, shift: float) -> float:
        if value in (0.0, 1.0):
            return value
        # expit(logit v + s) = v e^s / (v e^s + 1 - v), with the exponential kept at most 1
        factor = math.exp(-abs(shift))
        if shift > 0.0:
            return value / (value + (1.0 - value) * factor)
        return value * factor / (value * factor + (1.0 - value))

    def _difference(self, value: float, origin: float) -> float:
        if origin in (0.0, 1.0) or value in (0.0, 1.0):
            return math.inf if value > origin else -math.inf
        return (math.log(value) - math.log1p(-value)) - (math.log(origin) - math.log1p(-origin))


@register
class Linear(Space):
    """Differences: apply(v, s) = v + scale s. `scale` is one coordinate unit, in the value's unit.

    >>> Linear(10.0).apply(5.0, 0.25)
    7.5
    """

    scale: float = Field(default=1.0, gt=0, kw_only=False)

    def _apply(self, value: float, shift: float) -> float:
        return value + self.scale * shift

    def _difference(self, value: float, origin: float) -> float:
        return (value - origin) / self.scale


@register
class Relative(Space):
    """Multipliers: apply(v, s) = v (1 + s), never below 0. The paper's coordinate: in its Eq. 1 rho = 1 + s.

    Unlike the other spaces' shifts these do not add up: two shifts of 0.1 make 1.21, not 1.2.
    Source: Cheng et al. 2026, arXiv 2604.24708.

    >>> Relative().apply(8.0, -0.25), Relative().difference(10.0, 8.0)
    (6.0, 0.25)
    """

    domain: ClassVar[tuple[float, float]] = (0.0, math.inf)

    def _apply(self, value: float, shift: float) -> float:
        return 0.0 if value == 0.0 else value * max(1.0 + shift, 0.0)

    def _difference(self, value: float, origin: float) -> float:
        return math.inf if origin == 0.0 else (value - origin) / origin


@register
class Arcsine(Space):
    """Angles: apply(v, s) = sin^2(clip(arcsin sqrt v + s, 0, pi/2)). For probabilities best at 0, perhaps.

    The variance-stabilising coordinate of a proportion. Unlike `Logit` it reaches 0 and 1 with finite shifts,
    and leaves them again.

    >>> round(Arcsine().apply(0.0, 0.5), 4), Arcsine().apply(0.1, -0.5)
    (0.2298, 0.0)
    """

    domain: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def _apply(self, value: float, shift: float) -> float:
        return math.sin(min(max(_angle(value) + shift, 0.0), math.pi / 2)) ** 2

    def _difference(self, value: float, origin: float) -> float:
        return _angle(value) - _angle(origin)


def _angle(probability: float) -> float:
    """arcsin sqrt p, in [0, pi/2]; atan2 keeps its digits near p = 1, where arcsin loses half of them."""
    return math.atan2(math.sqrt(probability), math.sqrt(1.0 - probability))
