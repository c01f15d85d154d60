"""How much each replica counts in a mean: all alike, by a weight of its own, or by one for each parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hdet.errors import ConfigError


def shares(valid: Sequence[bool], weights: NDArray[np.float64] | None) -> list[float]:
    """[N] each replica's share in buffers and optimizer state, and in parameters where these have none of their own.

    Without weights 1 for each valid replica.

    Raises:
        ConfigError: weights that are negative or not finite, that are not one for each replica, that are above 0 for a
            replica that is not valid, or 0 for all.

    >>> shares([True, False, True], None)
    [1.0, 0.0, 1.0]
    """
    if weights is None:
        return [float(ok) for ok in valid]
    own = np.asarray(valid, dtype=bool)
    fits = len(weights) == len(own) and bool((np.isfinite(weights) & (weights >= 0)).all())
    if not fits or weights[~own].any() or not (weights.sum(axis=0) > 0).all():
        raise ConfigError(
            f"a merge weighs {len(valid)} replicas, valid {list(valid)}, by {weights.tolist()}; give each valid one a "
            f"finite weight of 0 or more, at least one of them above 0, and the others 0"
        )
    common: list[float] = (weights if weights.ndim == 1 else (weights / weights.sum(axis=0)).mean(axis=1)).tolist()
    return common


def runs(weights: NDArray[np.float64]) -> Iterator[tuple[slice, list[float]]]:
    """Of weights [N, P], the parameters that follow one another and are weighed alike, with their weights [N].

    >>> list(runs(np.array([[1.0, 1.0, 0.5], [1.0, 1.0, 0.0]])))
    [(slice(0, 2, None), [1.0, 1.0]), (slice(2, 3, None), [0.5, 0.0])]
    """
    start, count = 0, weights.shape[1]
    for place in range(1, count + 1):
        if place == count or (weights[:, place] != weights[:, start]).any():
            yield slice(start, place), weights[:, start].tolist()
            start = place
