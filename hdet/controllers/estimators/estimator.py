"""From the losses of one window to slopes: what estimators are given, and what they are.

A window leaves a `Comparison`: who stood at which level, and what each lost. An `Estimator` turns it into one
`Estimate` a knob, the zero-order hypergradient at the base.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hdet.controllers.estimate import Estimate
from hdet.errors import ConfigError
from hdet.spec import Spec

FloatArray = NDArray[np.float64]


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
        keep = self.valid.copy()
        for column in (*losses.T, *self.levels.T):
            keep &= np.isfinite(column)
        return (self.levels, losses) if keep.all() else (self.levels[keep], losses[keep])


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
