"""The sweep: every fixed setting of a task's grid, and the best of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from search_parts import cell
from search_parts.cell import Cell, Result
from search_parts.contender import Contender
from search_parts.task import Setting, Task

FIRST_SEED = 1000


@dataclass(frozen=True)
class Best:
    """The best fixed setting.

    Attributes:
        setting: of the grid. loss: its mean test loss over the sweep's seeds.
        runs: that the sweep took, each one budget.
        at_edge: learning rate at an end of the grid, so that a better one may lie beyond.
    """

    setting: Setting
    loss: float
    runs: int
    at_edge: bool


def cells(task: Task, fixed: Contender, seeds: int) -> list[Cell]:
    """The sweep's runs. Their seeds are not those contenders are compared with.

    The best setting is chosen by test loss on seeds of its own, and judged on the others: the oracle, with no
    optimism in its loss.
    """
    return [
        Cell.of(task, fixed, setting, FIRST_SEED + seed) for setting in task.grid.settings() for seed in range(seeds)
    ]


def best(task: Task, swept: Sequence[Cell], results: Mapping[Cell, Result]) -> Best:
    """The setting with the least mean test loss; a failed run counts as having learnt nothing."""
    found: dict[Setting, list[float]] = {}
    for one in swept:
        found.setdefault(one.setting, []).append(judged(task, results[one].test))
    means = {setting: float(np.mean(values)) for setting, values in found.items()}
    setting = min(means, key=lambda one: means[one])
    edge = setting.lr in (min(task.grid.lrs), max(task.grid.lrs)) and len(task.grid.lrs) > 1
    return Best(setting, means[setting], len(swept), edge)


def failed(task: Task, loss: float) -> bool:
    """Not finite, or above what a model that knows nothing gets."""
    return not math.isfinite(loss) or loss > task.ignorance


def judged(task: Task, loss: float) -> float:
    """The loss that enters means: a failed run is one that learnt nothing."""
    return task.ignorance if failed(task, loss) else loss


def losses(task: Task, contender: Contender, setting: Setting, seeds: Iterable[int]) -> NDArray[np.float64]:
    """Judged test losses of runs made here and now, by seed."""
    runs = (cell.run(task, contender, Cell.of(task, contender, setting, seed)) for seed in seeds)
    return np.array([judged(task, run.test) for run in runs])
