"""From the losses of one window to slopes: what estimators are given, what they return, what they are.

A window leaves a `Comparison`: who stood at which level, and what each lost. An `Estimator` turns it into one
`Estimate` a knob, the zero-order hypergradient at the base.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hdet.errors import ConfigError
from hdet.spec import Spec

FloatArray = NDArray[np.float64]


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
        span: how far from the base it was measured, in coordinate units, where the evidence tells.
        offset: where it was taken, relative to the base in coordinate units; 0 is at the base.

    >>> Estimate(slope=-0.5, stderr=0.25).t
    -2.0
    """

    slope: float
    curvature: float | None = None
    stderr: float = math.inf
    curvature_stderr: float | None = None
    averaged: Estimate | None = None
    level: float | None = None
    span: float | None = None
    offset: float = 0.0

    @classmethod
    def nothing(cls) -> Estimate:
        """The estimate of a window that taught nothing: slope 0, give or take infinity."""
        return cls(slope=0.0, stderr=math.inf)

    @property
    def t(self) -> float:
        """slope / stderr; 0 without a slope or an error, infinite when the error is exactly 0."""
        if math.isnan(self.slope) or math.isnan(self.stderr) or self.slope == 0 or math.isinf(self.stderr):
            return 0.0
        return self.slope / self.stderr if self.stderr > 0 else math.copysign(math.inf, self.slope)

    def to_dict(self) -> dict[str, Any]:
        """Its numbers and `t`, for a history; `averaged` nested where there is one."""
        numbers = {
            "slope": self.slope,
            "stderr": self.stderr,
            "t": self.t,
            "curvature": self.curvature,
            "curvature_stderr": self.curvature_stderr,
            "level": self.level,
            "span": self.span,
            "offset": self.offset,
        }
        return numbers if self.averaged is None else {**numbers, "averaged": self.averaged.to_dict()}

    @property
    def known(self) -> bool:
        """Whether there is a finite slope at all, with or without an error."""
        nothing = self.slope == 0 and math.isinf(self.stderr)
        return math.isfinite(self.slope) and not math.isnan(self.stderr) and not nothing

    @property
    def testable(self) -> bool:
        """Whether slope and standard error are both finite, so that `t` says something."""
        return math.isfinite(self.slope) and math.isfinite(self.stderr)


@dataclass(frozen=True)
class Comparison:
    """One window's evidence: N replicas (or counterfactual points), K knobs.

    Args:
        levels: [N, K] offsets from the base, in coordinates.
        losses: [N], or [N, J] when every replica was judged on the same J sub-batches.
        shifts: [K] the learned shift of each base: base and level together stand at `shifts + levels`.
        valid: [N] which replicas may be heard. One with a non-finite loss or level is never heard.

    Raises:
        ConfigError: the shapes disagree.
    """

    levels: FloatArray
    losses: FloatArray
    shifts: FloatArray
    valid: NDArray[np.bool_]

    def __post_init__(self) -> None:
        for name in ("levels", "losses", "shifts"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.float64))
        object.__setattr__(self, "valid", np.asarray(self.valid, dtype=np.bool_))
        shapes = (self.levels.shape, self.losses.shape, self.shifts.shape, self.valid.shape)
        n, k = self.levels.shape if self.levels.ndim == 2 else (-1, -1)
        if (
            self.losses.ndim not in (1, 2)
            or self.losses.shape[0] != n
            or self.losses.size == 0
            or self.shifts.shape != (k,)
            or self.valid.shape != (n,)
        ):
            raise ConfigError(
                "a comparison has levels [N, K], losses [N] or [N, J] with J >= 1, shifts [K], valid [N]; "
                f"got the shapes {', '.join(map(str, shapes))}"
            )

    @property
    def knobs(self) -> int:
        """K."""
        return int(self.levels.shape[1])

    def heard(self) -> tuple[FloatArray, FloatArray]:
        """Levels [n, K] and losses [n, J] of the replicas that may be heard; J is 1 for losses [N]."""
        losses = self.losses.reshape(len(self.losses), -1)
        finite = np.isfinite(losses).all(axis=1) & np.isfinite(self.levels).all(axis=1)
        keep = self.valid & finite
        return self.levels[keep], losses[keep]


class Estimator(Spec, family="estimator"):
    """How losses become slopes. A pure function of state and comparison; state is a dataclass of numbers.

    Subclass, decorate with `hdet.spec.register`, and it works in Python, in YAML and in ablations.
    """

    @abstractmethod
    def start(self, knobs: int) -> Any:
        """The state before the first window, for K knobs."""

    @abstractmethod
    def estimate(self, state: Any, comparison: Comparison) -> tuple[list[Estimate], Any]:
        """K estimates, and the state for the next window. `state` itself is left as it is."""
