"""Which rate to try next, and where the best one lies between those that were tried: numbers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hdet.errors import DivergedError
from hdet.sub_batches import student

CLEAR_T = 2.0
"""The t from which one trial counts as better than another, and the half width of intervals in standard errors."""

LEVEL_SHARE = 0.1
"""Trials closer together than this share of what was learned are level: the best may lie on either side of them."""

DIVERGED_SHARE = 0.1
"""A trial that ends this share above the loss it began with, and clearly so, has diverged."""

Verdict = Literal["settled", "flat", "still rising", "still falling", "no clear sign", "too short"]


@dataclass(frozen=True)
class Trial:
    """A short run at one learning rate.

    Attributes:
        rate: the peak of its schedule.
        losses: its held-out loss at the end by sub-batch of the probe; None where it was not finite.
    """

    rate: float
    losses: tuple[float, ...] | None

    @property
    def loss(self) -> float:
        """The mean of `losses`; infinite without any."""
        return float(np.mean(self.losses)) if self.losses is not None else math.inf


@dataclass(frozen=True)
class Minimum:
    """Where trials of one length have their lowest loss.

    Attributes:
        rate: of the lowest loss. low, high: between what it lies, by the trials; None where no trial bounds it.
        verdict: `settled`, trials on both sides are clearly worse; `flat`, a neighbour is not; `still rising` and
            `still falling`, the best is the highest or the lowest that was tried; `no clear sign`, the best trial
            ended no better than the model had been before it.
    """

    rate: float
    low: float | None
    high: float | None
    verdict: Verdict


def is_better(one: Trial, other: Trial) -> bool:
    """Whether a trial ended clearly below another: paired by sub-batch, t below -2; a finite one is below any other.

    >>> is_better(Trial(0.1, (1.0, 1.1, 0.9)), Trial(0.4, (2.0, 2.2, 1.9)))
    True
    """
    if one.losses is None or other.losses is None:
        return one.losses is not None and other.losses is None
    return student([a - b for a, b in zip(one.losses, other.losses, strict=True)]) < -CLEAR_T


def sound(trials: Sequence[Trial], before: Trial) -> list[Trial]:
    """The trials by rate; without losses where one has diverged, or one at a lower rate has.

    Beyond the highest stable rate losses are erratic, and a single one may be low by chance.

    >>> before = Trial(0.0, (1.0, 1.1))
    >>> [trial.losses for trial in sound([Trial(0.4, (0.5, 0.6)), Trial(0.1, (3.2, 3.3))], before)]
    [None, None]
    """
    ordered = sorted(trials, key=lambda trial: trial.rate)
    stable = list(takewhile(lambda trial: not _diverged(trial, before), ordered))
    return stable + [Trial(trial.rate, None) for trial in ordered[len(stable) :]]


def _diverged(trial: Trial, before: Trial) -> bool:
    if trial.losses is None:
        return True
    return is_better(before, trial) and trial.loss - before.loss > DIVERGED_SHARE * abs(before.loss)


def next_rate(trials: Sequence[Trial], before: Trial, factor: float) -> float:
    """The rate to try after at least one trial.

    Up by `factor` as long as the highest rate is not clearly worse than the best: far below the best rate nothing is
    learned, and trials cannot be told apart. Then down while the lowest is the best. Where something was learned and
    the lowest is about as good as the best, down comes first, since all rates may be too high. Then between the best
    and the better of its neighbours.

    Args:
        trials: so far. before: the losses of the weights that they began with.

    >>> next_rate([Trial(0.1, (2.0, 2.1)), Trial(0.4, (1.0, 1.1))], Trial(0.0, (2.3, 2.4)), factor=4.0)
    1.6
    """
    ordered = sound(trials, before)
    best = min(ordered, key=lambda trial: trial.loss)
    level = is_better(best, before) and ordered[0].loss - best.loss < LEVEL_SHARE * (before.loss - best.loss)
    if ordered[-1].losses is not None and not is_better(best, ordered[-1]) and not (level and len(ordered) > 1):
        return ordered[-1].rate * factor
    if ordered[0] is best or level:
        return ordered[0].rate / factor
    place = ordered.index(best)
    neighbour = min(ordered[place - 1], ordered[place + 1], key=lambda trial: trial.loss)
    return math.sqrt(best.rate * neighbour.rate)


def minimum(trials: Sequence[Trial], before: Trial) -> Minimum:
    """The rate of the lowest loss: the vertex of the parabola, in log rate, through the best trial and its neighbours.

    Its error is by the jackknife over sub-batches. A neighbour that is not clearly worse than the best may be the best
    as well, and so may all that lies beyond the highest or the lowest rate. Beside one that diverged no parabola tells,
    and the lowest loss may lie half-way to its neighbours.

    Args:
        trials: of one length, from the same weights, on the same batches.
        before: the losses of these weights.

    Raises:
        DivergedError: every trial has diverged, so that nothing is known of any rate that trains.
    """
    ordered = sound(trials, before)
    if ordered[0].losses is None:
        raise DivergedError(
            f"all {len(ordered)} trials diverged, at learning rates from {ordered[0].rate:.3g} to "
            f"{ordered[-1].rate:.3g}; begin at a lower one, or give more trials"
        )
    best = min(ordered, key=lambda trial: trial.loss)
    if not is_better(best, before):
        return Minimum(best.rate, None, None, "no clear sign")
    place = ordered.index(best)
    below = ordered[place - 1] if place else None
    above = ordered[place + 1] if place + 1 < len(ordered) else None
    if below is not None and above is not None and below.losses and above.losses and best.losses:
        vertices = _jackknife([below, best, above])
        rate = math.exp(vertices[0])
        count = len(vertices) - 1
        spread = vertices[1:] - vertices[1:].mean()
        error = math.sqrt((count - 1) / count * float(spread @ spread))
        low, high = rate * math.exp(-CLEAR_T * error), rate * math.exp(CLEAR_T * error)
    else:  # no parabola tells: it may lie half-way to the rates beside it
        rate = best.rate
        low, high = (math.sqrt(rate * (beside or best).rate) for beside in (below, above))
    if below is not None and not is_better(best, below):
        low = min(low, below.rate)
    if above is not None and not is_better(best, above):
        high = max(high, above.rate)
    if above is None:
        return Minimum(rate, low, None, "still rising")
    if below is None:
        return Minimum(rate, None, high, "still falling")
    clear = is_better(best, below) and is_better(best, above)
    return Minimum(rate, low, high, "settled" if clear else "flat")


def _jackknife(three: Sequence[Trial]) -> NDArray[np.float64]:
    """Vertices in log rate: of the mean losses first, then without each sub-batch in turn."""
    x = np.log([trial.rate for trial in three])
    losses = np.array([trial.losses for trial in three])  # [3, J]
    count = losses.shape[1]
    means = losses.mean(axis=1)
    without = (losses.sum(axis=1, keepdims=True) - losses) / (count - 1)
    return np.array([_vertex(x, y) for y in (means, *without.T)])


def _vertex(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Of the parabola through three points, no farther than half-way to a neighbour of the middle one."""
    left, right = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    bend = (right - left) / (x[2] - x[0])
    if bend <= 0.0:  # three losses alike, or a sub-batch's without which the middle one is no minimum
        return float(x[1])
    vertex = (x[0] + x[1]) / 2 - left / (2 * bend)
    return float(np.clip(vertex, (x[0] + x[1]) / 2, (x[1] + x[2]) / 2))
