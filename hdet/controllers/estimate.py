"""Slope and curvature of one knob, with standard errors: what controllers are given."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hdet.errors import ConfigError
from hdet.sub_batches import as_of_eight, normal_equivalent

MOST_EXCESS = 1.2
"""Of weights that nothing has trained: random matrices have about 1 at most, and training adds strong directions."""


@dataclass(frozen=True)
class Estimate:
    """Slope and curvature of the signal in one knob's coordinate, at the base, with standard errors.

    Args:
        slope: d signal / d coordinate. NaN means that nothing was learnt.
        curvature: d2 signal / d coordinate2, None where the evidence cannot tell.
        stderr: standard error of the slope; inf where it cannot be known.
        curvature_stderr: standard error of the curvature.
        averaged: the same comparison judged at window-averaged weights, where the evidence has it. The last
            iterate flatters small steps (short-horizon bias, Wu et al. 2018, arXiv:1803.02021); averaged
            weights do not, so the two bracket the truth.
        level: the signal itself, where the evidence tells; what a slope is large or small against.
        opening: the signal at the window's opening, where the evidence tells: what `level` is large against.
        span: how far from the base it was measured, in coordinate units, where the evidence tells.
        stretch: how long the way that a unit of the coordinate moves the weights is beside those weights, where the
            evidence tells; of weight decay, the share of them that it took in the window.
        excess: the spectral norms of the run's first weights in units of those of random ones
            (`hdet.evidence.parts.excess`), where the evidence tells; 0 where there is no matrix to tell by, None in all
            windows but the first.
        own_excess: the same of the weights that training can change alone, where the evidence tells: of adapters, which
            are drawn at random beside pretrained weights.
        step_size: how far a step at the schedule's peak, shift included, can change matrices, as a share of what they
            hold (`hdet.evidence.parts.step_size`), where the evidence tells.
        step_ratio: of one of several learning rates that share this estimate, how far its steps went beside the weights
            over the geometric mean of all (`hdet.evidence.parts.step_ratio`), where the evidence tells.
        rate_ratio: of one whose steps tell nothing by what it moves, as of vectors, its rate over the mean of those of
            the same scale that have a `step_ratio`.
        bottom: how far from where it was taken, in coordinate units, the signal is lowest as a parabola in the value
            itself (`hdet.evidence.parts.line_fit.bottom_in_value`), where the evidence proves that it has a bottom.
        offset: where it was taken, relative to the base in coordinate units; 0 is at the base.
        slopes: the slope in each of J sub-batches, of which `slope` is the mean and `stderr` the scatter's; () where
            there are none. Sub-batch j is to be comparable between windows, or independent: sums over windows are
            kept apart by j.
        freedom: the degrees of freedom of `stderr` where there are no slopes to tell: t is Student's on so many; None
            where it comes from very many numbers, or nobody knows.

    Raises:
        ConfigError: a standard error is below 0, degrees of freedom are not above it, or what is to be a number is
            none.

    >>> Estimate(slope=-0.5, stderr=0.25).t
    -2.0
    """

    slope: float
    curvature: float | None = None
    stderr: float = math.inf
    curvature_stderr: float | None = None
    averaged: Estimate | None = None
    level: float | None = None
    opening: float | None = None
    span: float | None = None
    stretch: float | None = None
    excess: float | None = None
    own_excess: float | None = None
    step_size: float | None = None
    step_ratio: float | None = None
    rate_ratio: float | None = None
    bottom: float | None = None
    offset: float = 0.0
    slopes: tuple[float, ...] = ()
    freedom: float | None = None

    def __post_init__(self) -> None:
        # Evidence of somebody's own may give NumPy's numbers, which neither a history nor a checkpoint can hold.
        for name in NUMBERS:
            value = getattr(self, name)
            if value is None and name not in NEEDED:
                continue
            try:
                object.__setattr__(self, name, tuple(map(float, value)) if name == "slopes" else float(value))
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{name} of an Estimate is {value!r}, and no number can be made of that") from error
        for name in ("stderr", "curvature_stderr"):
            given = getattr(self, name)
            if given is not None and given < 0:
                raise ConfigError(f"{name} must be at least 0, and inf where it cannot be known; got {given}")
        if self.freedom is not None and not self.freedom > 0.0:
            raise ConfigError(f"freedom must be above 0, and None where nobody knows it; got {self.freedom}")

    @classmethod
    def nothing(cls) -> Estimate:
        """The estimate of a window that taught nothing: slope 0, give or take infinity."""
        return cls(slope=0.0, stderr=math.inf)

    @classmethod
    def of_sub_batches(cls, slopes: NDArray[np.float64], curvatures: NDArray[np.float64] | None = None) -> Estimate:
        """The mean over J >= 2 sub-batches, and the standard error that their scatter tells.

        >>> Estimate.of_sub_batches(np.array([1.0, 3.0]))
        Estimate(slope=2.0, curvature=None, stderr=1.0, ..., slopes=(1.0, 3.0), freedom=None)
        """
        found = cls(float(slopes.mean()), stderr=_error(slopes), slopes=tuple(slopes.tolist()))
        if curvatures is None:
            return found
        return replace(found, curvature=float(curvatures.mean()), curvature_stderr=_error(curvatures))

    @property
    def t(self) -> float:
        """slope / stderr; 0 without a slope or an error, infinite when the error is exactly 0."""
        if math.isnan(self.slope) or math.isnan(self.stderr) or self.slope == 0 or math.isinf(self.stderr):
            return 0.0
        return self.slope / self.stderr if self.stderr > 0 else math.copysign(math.inf, self.slope)

    @property
    def t_of_eight(self) -> float:
        """`t`, or where few numbers tell its error, the t that would be as unlikely with eight sub-batches.

        >>> round(Estimate.of_sub_batches(np.array([1.0, 3.0])).t_of_eight, 2)
        1.12
        """
        freedom = len(self.slopes) - 1 if self.has_sub_batches else self.freedom
        return self.t if freedom is None else as_of_eight(self.t, freedom)

    @property
    def normal_stderr(self) -> float:
        """The standard error over which the slope is a normal deviate as unlikely as `t` is by `freedom`."""
        if self.freedom is None or self.t == 0.0 or math.isinf(self.t):
            return self.stderr
        return self.stderr * self.t / normal_equivalent(self.t, self.freedom)

    def to_dict(self) -> dict[str, Any]:
        """Its numbers and `t`, for a history; `averaged` nested where there is one."""
        numbers = {**vars(self), "t": self.t, "slopes": list(self.slopes)}
        averaged = numbers.pop("averaged")
        return numbers if averaged is None else {**numbers, "averaged": averaged.to_dict()}

    @property
    def untrained(self) -> bool | None:
        """Whether nothing had trained the run's first weights; None where the evidence does not tell."""
        return None if self.excess is None else 0.0 < self.excess <= MOST_EXCESS

    @property
    def pretrained(self) -> bool | None:
        """Whether the run's first weights had been trained; None where the evidence does not tell."""
        return None if self.excess is None else self.excess > MOST_EXCESS

    @property
    def relative_slope(self) -> float:
        """|slope| as a share of |level|; infinite without a level."""
        return abs(self.slope / self.level) if self.level else math.inf

    @property
    def known(self) -> bool:
        """Whether there is a finite slope at all, with or without an error."""
        nothing = self.slope == 0 and math.isinf(self.stderr)
        return math.isfinite(self.slope) and not math.isnan(self.stderr) and not nothing

    @property
    def testable(self) -> bool:
        """Whether slope and standard error are both finite, so that `t` says something."""
        return math.isfinite(self.slope) and math.isfinite(self.stderr)

    @property
    def has_sub_batches(self) -> bool:
        """Whether there are two or more finite slopes, so that sums over windows can be kept apart by sub-batch."""
        return len(self.slopes) > 1 and all(map(math.isfinite, self.slopes))


NUMBERS = tuple(own.name for own in fields(Estimate) if own.name != "averaged")
"""Of an `Estimate`, the fields that hold numbers; a subclass may have others."""
NEEDED = frozenset(own.name for own in fields(Estimate) if own.default is not None)
"""Of these, what no estimate is without."""


def _error(values: NDArray[np.float64]) -> float:
    """The standard error of a mean."""
    return float(values.std(ddof=1)) / math.sqrt(len(values))
