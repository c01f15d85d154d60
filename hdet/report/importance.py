"""Which knobs matter, and which depend on each other, with how sure that is; read off the records alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from hdet.record import WindowRecord, knobs_of
from hdet.report.reading import CLEAR_T, readings

LEAST_REPLICAS = 5
"""A window tells an interaction apart from a mean and two slopes with at least one replica to spare."""
LEAST_WINDOWS = 3
LEAST_SHARE = 1e-6
"""Of a product of levels, the part that must be left when it is freed of the slopes."""
CHUNK = 1000
MOST_WINDOWS = 2500
"""Of a longer run every second window, every third and so on is looked at, or the page would take its time for this."""


@dataclass(frozen=True)
class Importance:
    """How much the loss depends on a knob.

    With slope s_w and standard error e_w of each window, mean(s_w^2 - e_w^2) estimates the mean squared slope without
    the noise that squaring adds.

    Attributes:
        knob: its name.
        slope: the root of that: what one unit of the knob's coordinate changes the loss by; 0 where noise explains all.
        low, high: the root of the estimate less and plus two standard errors, which the scatter between windows gives.
        windows: with evidence on it.
    """

    knob: str
    slope: float
    low: float
    high: float
    windows: int


@dataclass(frozen=True)
class Interaction:
    """How much the effect of one knob depends on another.

    Attributes:
        knobs: the two.
        effect: what both raised together change the loss by, beyond what each does alone, for one standard deviation
            of the replicas' levels each. Negative where they help each other.
        stderr: its standard error, from the scatter between windows.
        windows: in which replicas differed in both.
    """

    knobs: tuple[str, str]
    effect: float
    stderr: float
    windows: int

    @property
    def clear(self) -> bool:
        """Whether it lies at least two standard errors from 0."""
        return abs(self.effect) >= CLEAR_T * self.stderr


def importances(history: Iterable[WindowRecord]) -> list[Importance]:
    """The knobs that several windows measured, the most important first.

    >>> told = {"slope": -0.5, "stderr": 0.1}
    >>> windows = [WindowRecord(w, w, w + 1, {"rate": 1.0}, {}, [], {"rate": told}, {}, False) for w in range(3)]
    >>> [(one.knob, round(one.slope, 2)) for one in importances(windows)]
    [('rate', 0.49)]
    """
    found = []
    history = _thinned(list(history))
    for knob in knobs_of(history):
        decisive = [told[0] for told in (readings(record, knob) for record in history) if told]
        if len(decisive) < LEAST_WINDOWS:
            continue
        squares = np.array([one.slope * one.slope - one.stderr * one.stderr for one in decisive])
        if not np.isfinite(squares).all():  # of losses that overflow, of which nothing can be told
            continue
        mean, doubt = float(squares.mean()), float(squares.std(ddof=1)) / math.sqrt(len(squares))
        roots = [math.sqrt(max(0.0, value)) for value in (mean, mean - 2 * doubt, mean + 2 * doubt)]
        if all(map(math.isfinite, roots)):
            found.append(Importance(knob, roots[0], roots[1], roots[2], len(decisive)))
    return sorted(found, key=lambda one: -one.slope)


@np.errstate(over="ignore", invalid="ignore")  # of what overflows nothing is told
def interactions(history: Iterable[WindowRecord]) -> list[Interaction]:
    """Pairs of knobs in which replicas differed at once, the clearest first; empty where replicas never did.

    Each window's losses are freed of their mean and of every knob's own slope; what is left is compared with the
    product of two knobs' levels, freed of the same. A product that a design cannot tell from a slope is left out.
    """
    history = list(history)
    knobs = knobs_of(history)
    history = _thinned(history)
    there = [
        record
        for record in history
        if len(record.losses) >= LEAST_REPLICAS
        and None not in record.losses
        and all(len(record.values.get(knob) or ()) == len(record.losses) for knob in knobs)
    ]
    # Rates of a hundred matrices that replicas share are thousands of pairs that tell nothing.
    knobs = [knob for knob in knobs if any(len(set(record.values[knob])) > 1 for record in there)]
    pairs = list(combinations(range(len(knobs)), 2))
    if not pairs:
        return []
    sums = [_products(same, knobs, pairs) for same in _alike(there)]
    covariances, squares = (np.concatenate(column) for column in zip(*sums, strict=True))
    found = [
        Interaction((knobs[i], knobs[j]), *told)
        for (i, j), covariance, square in zip(pairs, covariances.T, squares.T, strict=True)
        if (told := _pooled(covariance[square > LEAST_SHARE], square[square > LEAST_SHARE])) is not None
    ]
    return sorted(found, key=lambda one: -abs(one.effect) / one.stderr if one.stderr else 0.0)


def _thinned(history: Sequence[WindowRecord]) -> Sequence[WindowRecord]:
    return history[:: -(-len(history) // MOST_WINDOWS) or 1]


def _alike(records: Sequence[WindowRecord]) -> Iterator[list[WindowRecord]]:
    """Windows of as many replicas each, not too many at once."""
    for size in sorted({len(record.losses) for record in records}):
        same = [record for record in records if len(record.losses) == size]
        for first in range(0, len(same), CHUNK):
            yield same[first : first + CHUNK]


def _products(
    records: Sequence[WindowRecord], knobs: Sequence[str], pairs: Sequence[tuple[int, int]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[windows, pairs] each: the mean product of a pair's freed levels with the losses, and with itself."""
    losses = np.array([record.losses for record in records], dtype=np.float64)
    levels = _standardized(np.array([[record.values[knob] for knob in knobs] for record in records]))
    basis = np.zeros_like(levels)  # [windows, knobs, replicas], orthonormal, zero where a knob adds nothing
    for k in range(len(knobs)):
        rest = _freed(levels[:, k : k + 1], basis[:, :k])
        length = np.sqrt((rest**2).sum(axis=2, keepdims=True))
        basis[:, k : k + 1] = np.where(length > LEAST_SHARE, rest / np.maximum(length, LEAST_SHARE), 0.0)
    product = levels[:, [i for i, _ in pairs]] * levels[:, [j for _, j in pairs]]
    product = _freed(product - product.mean(axis=2, keepdims=True), basis)
    return (product * losses[:, None, :]).mean(axis=2), (product**2).mean(axis=2)


def _freed(values: NDArray[np.float64], basis: NDArray[np.float64]) -> NDArray[np.float64]:
    """[windows, some, replicas] without their parts along an orthonormal basis."""
    return values - (values @ basis.swapaxes(1, 2)) @ basis


def _pooled(covariances: NDArray[np.float64], squares: NDArray[np.float64]) -> tuple[float, float, int] | None:
    """The effect over all windows, its standard error and the number of windows."""
    count = len(squares)
    if count < LEAST_WINDOWS:
        return None
    effect = float(covariances.sum() / squares.sum())
    scatter = float(((covariances - effect * squares) ** 2).sum())
    stderr = math.sqrt(scatter * count / (count - 1)) / float(squares.sum())
    return (effect, stderr, count) if math.isfinite(effect + stderr) else None


def _standardized(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """[windows, knobs, replicas] with mean 0 and standard deviation 1 over replicas; zeros where all are the same."""
    centred = values - values.mean(axis=2, keepdims=True)
    deviation = centred.std(axis=2, keepdims=True)
    varies = deviation > 1e-12 * np.abs(values).max(axis=2, keepdims=True)
    return np.where(varies, centred / np.where(varies, deviation, 1.0), 0.0)
