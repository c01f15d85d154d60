"""An estimator with memory: a quadratic picture of the loss that every window sharpens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pydantic import Field

from hdet.controllers.estimate import Estimate
from hdet.controllers.estimators.estimator import Comparison, Estimator, FloatArray
from hdet.controllers.estimators.regression import varies
from hdet.spec import register

# A normal variable's standard deviation in units of its median absolute deviation.
_NORMAL_MAD = 1.4826
# Shares of the losses' variance, or of the levels' largest singular value, below this are rounding error.
_NEGLIGIBLE = 1e-9
# A share of the largest entry of a matrix that its rounding reaches, with a margin of about a hundred.
_ROUNDING = 1e-14


@dataclass(frozen=True)
class KalmanState:
    """What is believed, in absolute coordinates (shift + level).

    `mean` [2K] holds the slopes at coordinate 0, then the curvatures; `covariance` is [2K, 2K]; `widths` [K]
    are the largest levels when first seen (0: never explored yet), `squares` and `freedom` the discounted
    sums whose ratio is the noise variance.
    """

    mean: FloatArray
    covariance: FloatArray
    widths: FloatArray
    squares: float
    freedom: float


@register
class Kalman(Estimator):
    r"""A Kalman filter over slopes and curvatures, in absolute coordinates u = shift + level.

    Model of window w: `L_r = a_w + sum_k (b_k u_rk + c_k u_rk^2 / 2) + e_r`, the intercept `a_w` profiled out
    and `e ~ N(0, s^2)`. Reported at the base: `slope = b + c u`, `curvature = c`. As the base moves, slopes
    seen at different places reveal the curvature, even with two levels, and more knobs than replicas can be
    told apart over several windows.

    Between windows the slope at the base walks at random by `drift * s / width` and the curvature by
    `drift * s / width^2`, so memory is about `1 / (drift sqrt N)` windows long (two levels), and nothing
    depends on the units of loss or knob. `s` is estimated from posterior residuals; when the losses are
    [N, J], from the disagreement of paired sub-batches, whose covariance then also replaces `s^2 I` in the
    error.
    Surprises (loss less prediction) further than `winsorise` robust standard deviations from their median,
    and from what the filter thought possible, are pulled in to there.

    A window with fewer than two replicas heard, or no difference between their losses, changes nothing.

    Args:
        drift: random walk per window, in noise standard deviations per width (q = 0.05).
        winsorise: limit on surprises, in normal-consistent median absolute deviations.
        memory: share of the noise estimate's weight kept from window to window.
        prior: how diffuse the start is, in standard deviations of the first window's losses per width.
        replica_noise: estimate `s` from posterior residuals even when there are sub-batches, and add their
            covariance; set it where replicas take their own gradients, so differ by more than their levels.

    >>> kalman = Kalman()
    >>> u, state = np.array([-0.5, -0.2, 0.2, 0.5]), kalman.start(knobs=1)
    >>> for shift in (0.0, 0.5, 1.0):                       # loss (u - 2)^2 / 2, seen from three bases
    ...     losses = (shift + u - 2) ** 2 / 2
    ...     comparison = Comparison(u[:, None], losses, shifts=np.array([shift]), valid=np.ones(4))
    ...     (estimate,), state = kalman.estimate(state, comparison)
    >>> round(estimate.slope, 2), round(estimate.curvature, 2)
    (-1.0, 1.0)
    """

    drift: float = Field(default=0.05, ge=0, le=10)
    winsorise: float = Field(default=2.5, gt=0)
    memory: float = Field(default=0.9, ge=0, lt=1)
    prior: float = Field(default=10.0, gt=0, le=1000)
    replica_noise: bool = False

    def start(self, knobs: int) -> KalmanState:
        return KalmanState(np.zeros(2 * knobs), np.zeros((2 * knobs, 2 * knobs)), np.zeros(knobs), 0.0, 0.0)

    def estimate(self, state: KalmanState, comparison: Comparison) -> tuple[list[Estimate], KalmanState]:
        levels, losses = comparison.heard()
        if len(levels) < 2 or not varies(levels).any():
            return [Estimate.nothing()] * comparison.knobs, state
        places = comparison.shifts + levels
        with np.errstate(all="ignore"):
            columns = np.hstack([places, places**2 / 2])
            columns = columns - columns.mean(axis=0)
            contrasts = losses - losses.mean(axis=0)
            observed = contrasts.mean(axis=1)
            scale = float((observed**2).mean())
            if not (np.isfinite(scale) and _NEGLIGIBLE * scale > 0 and np.isfinite(contrasts).all()):
                return [Estimate.nothing()] * comparison.knobs, state
            widths, covariance = self._predict(state, levels, comparison.shifts, scale)
            explained = columns @ covariance @ columns.T
            if not np.isfinite(explained).all():
                return [Estimate.nothing()] * comparison.knobs, state
            noise_before = state.squares / state.freedom if state.freedom >= 1 else scale
            expected = np.sqrt(((columns @ covariance) * columns).sum(axis=1) + noise_before)
            surprise = _winsorised(observed - columns @ state.mean, expected, self.winsorise)
            noise, variance, squares, freedom = self._noise(state, explained, surprise, levels, contrasts, scale)
            total = explained + variance * np.eye(len(levels))
            gain = np.linalg.solve(total, columns @ covariance).T
            mean = state.mean + gain @ surprise
            # Joseph's form: right for any gain, so errors stay honest when `noise` is not `variance * I`.
            keep = np.eye(len(mean)) - gain @ columns
            covariance = keep @ covariance @ keep.T + gain @ noise @ gain.T
            covariance = (covariance + covariance.T) / 2
        if not (np.isfinite(mean).all() and np.isfinite(covariance).all() and np.isfinite([squares, freedom]).all()):
            return [Estimate.nothing()] * comparison.knobs, state
        state = KalmanState(mean, covariance, widths, squares, freedom)
        return _at(state, comparison.shifts), state

    def _predict(
        self, state: KalmanState, levels: FloatArray, shifts: FloatArray, scale: float
    ) -> tuple[FloatArray, FloatArray]:
        """Widths and covariance once this window's random walk, and the prior of new knobs, are in."""
        knobs = len(shifts)
        widths, covariance = state.widths.copy(), state.covariance.copy()
        noise = state.squares / state.freedom if state.freedom > 0 else 0.0
        moving = varies(levels)
        for k in range(knobs):
            if widths[k] > 0:
                variance = self.drift**2 * noise
            elif moving[k]:
                widths[k] = np.abs(levels[:, k]).max()
                variance = self.prior**2 * scale
            else:
                continue
            # A walk of the slope *here* and of the curvature: seen from coordinate 0, where b = slope - c u.
            local = np.diag([variance / widths[k] ** 2, variance / widths[k] ** 4])
            seen = np.array([[1.0, -shifts[k]], [0.0, 1.0]])
            covariance[np.ix_([k, knobs + k], [k, knobs + k])] += seen @ local @ seen.T
        return widths, covariance

    def _noise(
        self,
        state: KalmanState,
        explained: FloatArray,
        surprise: FloatArray,
        levels: FloatArray,
        contrasts: FloatArray,
        scale: float,
    ) -> tuple[FloatArray, float, float, float]:
        """Noise covariance [n, n] of the mean losses, its working variance, and the sums behind that.

        `explained` [n, n] is the variance that the state leaves to the mean losses. A noise that is no more than its
        rounding, as after one window with an enormous loss, could not be told from none, and what has to be inverted
        would be singular.
        """
        n, batches = contrasts.shape
        floor = max(_NEGLIGIBLE * scale, _ROUNDING * float(np.trace(explained)))
        sampling = np.cov(contrasts) / batches if batches > 1 else np.zeros((n, n))
        if batches > 1 and not self.replica_noise:
            basis, singular, _ = np.linalg.svd(levels - levels.mean(axis=0), full_matrices=False)
            basis = basis[:, singular > _NEGLIGIBLE * singular[0]]
            squares = self.memory * state.squares + float(np.trace(basis.T @ sampling @ basis))
            freedom = self.memory * state.freedom + basis.shape[1]
            return sampling, max(squares / freedom, floor), squares, freedom
        # Posterior residual v S^-1 e, S = H P H' + v I: its expected square is v on trace(v S^-1) - 1 degrees
        # of freedom (one for the intercept). Directions of which the filter knows nothing yet do not count.
        variance = max(state.squares / state.freedom if state.freedom >= 1 else scale, floor)
        squares, freedom = state.squares, state.freedom
        for _ in range(3):
            inverse = variance * np.linalg.inv(explained + variance * np.eye(n))
            residual = inverse @ surprise
            squares = self.memory * state.squares + float(residual @ residual)
            freedom = self.memory * state.freedom + max(float(np.trace(inverse)) - 1, 0.0)
            variance = max(squares / freedom if freedom >= 1 else scale, floor)
        return sampling + variance * np.eye(n), variance, squares, freedom


def _winsorised(surprise: FloatArray, expected: FloatArray, limit: float) -> FloatArray:
    """Surprises [n] clipped about their median, given the standard deviations expected of them.

    The median absolute deviation alone will not do: with two levels the losses of a strong knob lie in
    clusters, half of them on the median, and an honest signal would be clipped away.
    """
    surprise = surprise - np.median(surprise)
    robust = _NORMAL_MAD * float(np.median(np.abs(surprise)))
    reach = limit * np.maximum(expected, robust)
    surprise = np.clip(surprise, -reach, reach)
    return np.asarray(surprise - surprise.mean())


def _at(state: KalmanState, shifts: FloatArray) -> list[Estimate]:
    """What the state says about every knob, its base standing at `shifts`."""
    knobs = len(shifts)
    estimates = []
    for k, shift in enumerate(shifts):
        if state.widths[k] == 0:
            estimates.append(Estimate.nothing())
            continue
        slope, curvature = state.mean[k] + state.mean[knobs + k] * shift, state.mean[knobs + k]
        block = state.covariance[np.ix_([k, knobs + k], [k, knobs + k])]
        direction = np.array([1.0, shift])
        with np.errstate(all="ignore"):
            variance = float(direction @ block @ direction)
        if not np.isfinite([slope, variance]).all():
            estimates.append(Estimate.nothing())
            continue
        estimates.append(
            Estimate(
                slope=float(slope),
                curvature=float(curvature),
                stderr=float(np.sqrt(max(variance, 0.0))),
                curvature_stderr=float(np.sqrt(max(block[1, 1], 0.0))),
            )
        )
    return estimates
