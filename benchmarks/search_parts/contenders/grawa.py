"""GRAWA: replicas with local gradients, merged by weights that favour flat places."""

from __future__ import annotations

import hdet
from hdet.contrib import Grawa
from hdet.merges import Merge
from search_parts.replicated import REPLICAS, Replicated, windows_of
from search_parts.task import Problem, Task, split


class ByGradientNorm(Replicated):
    """The rate is the given one, under the fixed cosine.

    At a window's end each replica takes a gradient on one more quarter of a batch, the same for all. That costs the
    passes of a step, and as many steps fewer are made.
    """

    name = "grawa"
    title = "GRAWA, fixed cosine"
    order = 45
    adaptive = False

    def merge(self) -> Merge:
        return Grawa(optimizer="keep")

    def steps(self, task: Task) -> int:
        return max(steps for steps in range(1, task.steps) if steps + windows_of(steps) <= task.steps)

    def objective(self, task: Task, problem: Problem) -> hdet.Objective:
        return hdet.Objective(problem.loss, lambda window: split(problem.batch(task.steps + window), 2 * REPLICAS)[:2])


CONTENDER = ByGradientNorm()
