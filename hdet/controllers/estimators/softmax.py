"""The paper's estimate: where the better replicas stand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import Field

from hdet.controllers.estimate import Estimate
from hdet.controllers.estimators.estimator import Comparison, Estimator, FloatArray
from hdet.controllers.estimators.regression import varies
from hdet.spec import register


@dataclass(frozen=True)
class SoftmaxState:
    """What smoothing remembers.

    Attributes:
        advantages: [K, N] smoothed sums of mean L - L_r, of each knob by rising level; [K, 0] before the first.
        weight: what the windows' weights come to, 1 - smoothing^windows.
    """

    advantages: FloatArray
    weight: float


@register
class Softmax(Estimator):
    """The displacement of the softmax-weighted mean level, negated so that it has the sign of a slope.

    `w_r = softmax_r((mean L - L_r) / sigma)`, `slope_k = -(sum_r w_r z_rk - mean_r z_rk)`
    (Cheng, Huang, Zhu and Alonso 2026, arXiv:2604.24708). It is a length in coordinates, not a loss per
    coordinate: for the paper's spread of width a it is `(a^2 c_N / sigma) dL/dz` to first order, with
    `c_N = (N + 1) / (3 (N - 1))`, and it never exceeds the spread.

    The standard error is the delta method's, `d slope / d L_r = w_r (z_r - sum w z) / sigma`: over paired
    sub-batches when the losses are [N, J], else with the variance of the losses themselves (which supposes
    that no knob matters, and so is too wide when one does).

    With `smoothing` b the advantages a = mean L - L_r are averaged over windows first, m <- b m + (1 - b) a, and
    m / (1 - b^windows) takes their place. Replicas change levels at every window. So what is averaged is the
    advantage of a knob's lowest level, of the next, and so on, not that of a replica, which would mix levels. The
    standard error takes windows for independent and equally noisy.

    Args:
        sigma: temperature in units of the loss. The paper's text says 0.1.
        smoothing: b, the share of the smoothed advantages that is kept at each window; 0, as printed in the paper, for
            this window's alone.

    >>> levels, losses = np.array([[-1.0], [1.0]]), np.array([1.1, 1.0])
    >>> comparison = Comparison(levels, losses, shifts=np.zeros(1), valid=np.ones(2))
    >>> rule = Softmax(sigma=0.1)
    >>> estimates, _ = rule.estimate(rule.start(knobs=1), comparison)
    >>> round(estimates[0].slope, 4)                    # -tanh(1/2)
    -0.4621
    """

    sigma: float = Field(default=0.1, gt=0, kw_only=False)
    smoothing: float = Field(default=0.0, ge=0, lt=1)

    def start(self, knobs: int) -> SoftmaxState:
        return SoftmaxState(np.zeros((knobs, 0)), 0.0)

    def estimate(self, state: Any, comparison: Comparison) -> tuple[list[Estimate], Any]:
        levels, losses = comparison.heard()
        if len(levels) < 2:
            return [Estimate.nothing()] * comparison.knobs, state
        moving = varies(levels)
        levels = levels - levels.mean(axis=0)
        share = 1.0
        freedom = losses.shape[1] - 1 or None  # the spread of the losses themselves is no Student's
        if not self.smoothing:
            contrasts = losses - losses.min(axis=0)
            given = [(level, -contrasts.mean(axis=1), contrasts) for level in levels.T]
        else:
            state = self._smoothed(state, comparison)
            places = _places(comparison.levels)
            told = np.where(comparison.valid[:, None], comparison.losses.reshape(len(places), -1), np.nan)
            # Windows that are independent and equally noisy, summed with weights (1 - b) b^age / weight.
            b, gone = self.smoothing, 1.0 - state.weight
            share = float(np.sqrt((1 - b) / (1 + b) * (1 + gone) / (1 - gone)))
            given = []
            for k in range(comparison.knobs):
                order, own = np.argsort(places[:, k]), comparison.levels[:, k]
                given.append((own[order] - own.mean(), state.advantages[k] / state.weight, told[order]))
        estimates = []
        for one, moves in zip(given, moving.tolist(), strict=True):
            slope, stderr = self._displaced(*one, share)
            usable = moves and bool(np.isfinite(slope))
            error = stderr if usable and np.isfinite(stderr) else np.inf
            estimates.append(Estimate(slope=float(slope) if usable else 0.0, stderr=float(error), freedom=freedom))
        return estimates, state

    def _displaced(
        self, levels: FloatArray, advantages: FloatArray, losses: FloatArray, share: float
    ) -> tuple[float, float]:
        """The slope and its standard error; `share` of this window's error is that of the advantages."""
        with np.errstate(over="ignore", invalid="ignore"):
            weights = np.exp((advantages - advantages.max()) / self.sigma)
            weights /= weights.sum()
            centre = (weights - 1 / len(weights)) @ levels  # exactly 0 for equal losses, as is its error
            gradient = weights * (levels - centre) / self.sigma
            sound = np.isfinite(losses).all(axis=1)
            contrasts = losses[sound] - losses[sound].min(axis=0)
            if losses.shape[1] > 1:
                stderr = (gradient[sound] @ contrasts).std(ddof=1) / np.sqrt(losses.shape[1])
            else:
                stderr = contrasts[:, 0].std(ddof=1) * np.sqrt((gradient[sound] ** 2).sum())
        return 0.0 - float(centre), share * float(stderr)

    def _smoothed(self, state: SoftmaxState, comparison: Comparison) -> SoftmaxState:
        """The window's advantages added; a level whose replica failed keeps what it had."""
        if state.advantages.shape != comparison.levels.T.shape:  # another number of replicas, or none yet
            state = SoftmaxState(np.zeros(comparison.levels.T.shape), 0.0)
        losses = comparison.losses.reshape(len(comparison.losses), -1).mean(axis=1)
        sound = comparison.valid & np.isfinite(losses) & np.isfinite(comparison.levels).all(axis=1)
        advantages = state.advantages.copy()
        weight = 1.0 - self.smoothing * (1.0 - state.weight)
        # A level that was not heard goes on as it was: its debiased mean stays.
        advantages *= weight / state.weight if state.weight else 0.0
        gained = (losses[sound].mean() - losses[sound])[:, None]
        rows = _places(comparison.levels)[sound]
        for k in range(comparison.knobs):
            before = state.advantages[k, rows[:, k]]
            advantages[k, rows[:, k]] = self.smoothing * before + (1.0 - self.smoothing) * gained[:, 0]
        return SoftmaxState(advantages, weight)


def _places(levels: FloatArray) -> FloatArray:
    """[N, K] the place of each replica's level among a knob's, from the lowest."""
    return np.asarray(np.argsort(np.argsort(levels, axis=0, kind="stable"), axis=0))
