"""Spreads: how far the replicas' levels lie from the base, in the coordinate of the knob's space.

A spread turns a number of replicas into that many *levels*, ascending, whose sum is zero, so that together
the replicas neither raise nor lower the knob. Who gets which level is the design's affair
(`hdet.hparams.design`).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hdet.errors import ConfigError
from hdet.spec import Spec, register


class Spread(Spec, family="spread"):
    """Levels around the base. A new spread gives `_levels`; zero width and single replicas are handled here.

    `width` is the size of the spread in coordinate units (nats for `Log`, radians for `Arcsine`, ...); 0
    turns exploration off. `two_level` says that half of an even number of replicas share one level and half
    another, which is what a design of signs (`Hadamard`) needs.
    """

    two_level: ClassVar[bool] = False

    width: float = Field(ge=0, kw_only=False)

    def levels(self, n: int) -> NDArray[np.float64]:
        """The [n] offsets from the base (or from base + `centre(n)`, if not 0), ascending, summing to 0.

        Exactly zeros at width 0.

        Raises:
            ConfigError: n < 1, or n = 1 with a width, as one replica has nothing to be compared with; `_levels` gave
                other than n finite numbers whose sum is 0.
        """
        if n < 1:
            raise ConfigError(f"a spread needs at least one replica; got n={n}")
        if self.width == 0.0:
            return np.zeros(n)
        if n == 1:
            raise ConfigError(
                f"a spread with one replica: {type(self).__name__}(width={self.width}) compares nothing; "
                f"use more replicas, width=0, or counterfactual evidence"
            )
        levels = np.asarray(self._levels(n), dtype=np.float64)
        sound = levels.shape == (n,) and bool(np.isfinite(levels).all())
        if not sound or abs(levels.sum()) > 1e-9 * n * np.abs(levels).max():
            raise ConfigError(
                f"{type(self).__name__}._levels({n}) gave {levels.tolist()}, and {n} levels whose sum is 0 are wanted, "
                f"so that the replicas together neither raise nor lower the knob; a mean off the base is `centre`"
            )
        return levels

    def centre(self, n: int) -> float:
        """Offset of the mean level from the base, in coordinate units: 0 for every symmetric spread."""
        return 0.0

    @abstractmethod
    def _levels(self, n: int) -> NDArray[np.float64]:
        """`levels` for n >= 2 and a width above 0."""


@register
class Symmetric(Spread):
    """Equally spaced: level_r = a (r - (N-1)/2) / max((N-1)/2, 1/2), r = 0 .. N-1.

    With the space `Relative` the values base (1 + level_r) are the paper's Eq. 1, a = 1/9 its setting.
    Source: Cheng et al. 2026, arXiv 2604.24708.

    >>> Symmetric(0.3).levels(4).round(3).tolist()
    [-0.3, -0.1, 0.1, 0.3]
    """

    width: float = Field(default=1 / 9, ge=0, kw_only=False)

    def _levels(self, n: int) -> NDArray[np.float64]:
        half = max((n - 1) / 2, 0.5)
        return self.width * ((np.arange(n, dtype=np.float64) - (n - 1) / 2) / half)


@register
class TwoLevel(Spread):
    """Half the replicas at -width, half at +width; an odd one out stays at the base.

    The variance of a fitted slope is proportional to 1 / sum level^2, so no other spread of the same width
    says more about it (8 replicas of `Symmetric` have 2.3 times the variance), and orthogonal designs need
    two levels.

    >>> TwoLevel(0.5).levels(5).tolist()
    [-0.5, -0.5, 0.0, 0.5, 0.5]
    """

    two_level: ClassVar[bool] = True

    def _levels(self, n: int) -> NDArray[np.float64]:
        return mirrored(np.full(n // 2, self.width), n)


@register
class OneSided(Spread):
    """Half the replicas stay at the base, half go `width` to one side; an odd one out stays at the base.

    For a knob whose optimum may lie on a bound, such as dropout at 0. The levels are centred like every
    spread's; `centre(n)` is what they were centred by, and a replica's shift from the base is
    `centre(n) + level`, which is exactly 0 for those that stay.

    >>> spread = OneSided(0.2)
    >>> spread.levels(4).tolist(), spread.centre(4)
    ([-0.1, -0.1, 0.1, 0.1], 0.1)
    """

    two_level: ClassVar[bool] = True

    side: Literal["up", "down"] = Field(default="up", kw_only=False)

    def centre(self, n: int) -> float:
        """The mean shift of the replicas: width (N//2) / N upwards or downwards, in coordinate units."""
        mean = self.width * (n // 2) / n
        return mean if self.side == "up" else -mean

    def _levels(self, n: int) -> NDArray[np.float64]:
        centre, moving = abs(self.centre(n)), n // 2
        up = np.repeat([-centre, self.width * (n - moving) / n], [n - moving, moving])
        return up if self.side == "up" else -up[::-1]


def mirrored(magnitudes: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    """[n] levels: minus the descending magnitudes, a 0 if n is odd, and their mirror image."""
    return np.concatenate([-magnitudes, np.zeros(n % 2), magnitudes[::-1]])
