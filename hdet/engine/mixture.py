"""Mixtures of weights: at which shares of some weights a loss is lowest that is known at a few of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, combinations_with_replacement
from typing import Any

import numpy as np
from numpy.typing import NDArray

Shares = NDArray[np.float64]
"""[K] of K weights: not negative, of sum 1."""

Pair = tuple[int, int]


def nodes(of: Sequence[int], size: int) -> dict[Pair, Shares]:
    """For each of some weights among `size`, and for each pair of them, the shares at it and half-way between.

    >>> {pair: shares.tolist() for pair, shares in nodes([0, 2], size=3).items()}
    {(0, 0): [1.0, 0.0, 0.0], (0, 2): [0.5, 0.0, 0.5], (2, 2): [0.0, 0.0, 1.0]}
    """
    corners = np.eye(size)
    return {(i, j): (corners[i] + corners[j]) / 2 for i, j in combinations_with_replacement(of, 2)}


def lowest(of: Sequence[int], losses: Mapping[Pair, Any], size: int) -> tuple[Shares, float]:
    """Shares at which the quadratic through the mean losses at all `nodes` is lowest, and its value there.

    It is the sum over all i and j of share i times share j times 2 loss(i, j) - (loss(i, i) + loss(j, j)) / 2. On each
    face of the simplex the point where it is level is worked out; the lowest of these is its minimum. A face on which a
    loss is not finite has none.

    >>> shares, value = lowest([0, 1], {(0, 0): 2.0, (0, 1): 1.5, (1, 1): 2.0}, 2)
    >>> shares.tolist(), value
    ([0.5, 0.5], 1.5)
    """
    with np.errstate(invalid="ignore"):
        form = _form(of, losses)
        at, value = np.eye(size)[of[0]], float(form[0, 0])
        for count in range(1, len(of) + 1):
            for face in map(list, combinations(range(len(of)), count)):
                part = form[np.ix_(face, face)]
                shares = _level(part)
                if shares is not None and shares.min() >= 0 and (there := float(shares @ part @ shares)) < value:
                    at, value = np.zeros(size), there
                    at[[of[k] for k in face]] = shares
    return at, value


def _form(of: Sequence[int], losses: Mapping[Pair, Any]) -> NDArray[np.float64]:
    """[K, K] the quadratic form through the mean losses."""
    own = np.array([np.mean(losses[i, i]) for i in of])
    form = np.diag(own)
    for a, b in combinations(range(len(of)), 2):
        form[a, b] = form[b, a] = 2 * np.mean(losses[of[a], of[b]]) - (own[a] + own[b]) / 2
    return form


def _level(form: NDArray[np.float64]) -> Shares | None:
    """Where shares of sum 1 make the form stationary; None where no one point does."""
    ones = np.ones((len(form), 1))
    system = np.block([[2 * form, ones], [ones.T, np.zeros((1, 1))]])
    try:
        solved: Shares = np.linalg.solve(system, np.append(np.zeros(len(form)), 1.0))[:-1]
    except np.linalg.LinAlgError:
        return None
    return solved
