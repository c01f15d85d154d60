"""What the numbers say: ranks over cases, and how sure the ranks are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from search_parts.interval import Interval

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
Case = tuple[str, str]
RESAMPLES = 2000


def ranks(losses: Array) -> Array:
    """[contenders, seeds] losses to ranks within each seed, 1 the best; equal losses share their mean rank.

    Failed runs are to be given as infinity, and so share the last ranks.

    >>> ranks(np.array([[1.0, math.inf], [2.0, math.inf], [0.5, 3.0]]))
    array([[2. , 2.5],
           [3. , 2.5],
           [1. , 1. ]])
    """
    found: Array = stats.rankdata(losses, axis=0)
    return found


@dataclass(frozen=True)
class Standing:
    """A contender's mean rank over tasks and starting points.

    Attributes:
        rank: with an interval from resampling cases, and the seeds of each task.
        by_task: the same mean, with an interval from resampling whole tasks, since the starting points of one
            task are alike.
        behind: its mean rank minus the reference's, cases and seeds resampled; above 0 it is worse.
    """

    rank: Interval
    by_task: Interval
    behind: Interval


def standings(losses: Mapping[Case, Array], reference: int, seed: int = 0) -> list[Standing]:
    """Mean ranks with bootstrap intervals.

    Args:
        losses: by (task, starting point), [contenders, seeds], the same in each.
            A column holds runs of one seed, on the same data, so contenders are ranked within it. All starting
            points of a task share its seeds, which are therefore drawn together.
        reference: the contender others are compared with.
        seed: of the resampling.
    """
    names = list(losses)
    table = np.stack([ranks(losses[case]) for case in names])  # [cases, contenders, seeds]
    rng = np.random.default_rng(seed)
    cases, contenders, _ = table.shape
    tasks = list(dict.fromkeys(task for task, _ in names))
    task_of = np.array([tasks.index(task) for task, _ in names])
    members = [np.flatnonzero(task_of == i) for i in range(len(tasks))]
    free, clustered = np.empty((RESAMPLES, contenders)), np.empty((RESAMPLES, contenders))
    for sample in range(RESAMPLES):
        drawn = rng.integers(cases, size=(cases,))
        free[sample] = _resampled(table, drawn, task_of[drawn], rng)
        whole = [members[i] for i in rng.integers(len(tasks), size=len(tasks))]
        places = np.repeat(np.arange(len(tasks)), [len(own) for own in whole])
        clustered[sample] = _resampled(table, np.concatenate(whole), places, rng)
    means = table.mean(axis=(0, 2))
    behind = free - free[:, [reference]]
    return [
        Standing(
            _interval(means[k], free[:, k]),
            _interval(means[k], clustered[:, k]),
            _interval(means[k] - means[reference], behind[:, k]),
        )
        for k in range(contenders)
    ]


def _resampled(table: Array, cases: Indices, tasks: Indices, rng: np.random.Generator) -> Array:
    """[contenders] mean rank over drawn cases; those of one task have one draw of seeds."""
    seeds = table.shape[2]
    columns = rng.integers(seeds, size=(tasks.max() + 1, seeds))[tasks]
    drawn: Array = table[cases[:, None], :, columns].mean(axis=(0, 1))
    return drawn


def _interval(mean: float, samples: Array) -> Interval:
    low, high = np.quantile(samples, [0.025, 0.975])
    return Interval(float(mean), float(low), float(high))
