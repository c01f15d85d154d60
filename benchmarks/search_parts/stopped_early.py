"""Searches that begin many settings and stop the worse ones early, within one run's budget."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Protocol

from torch import nn

from hdet.schedules import Cosine
from search_parts.contender import Contender, Outcome, begin, update
from search_parts.meter import Meter
from search_parts.task import Problem, Setting, Task
from search_parts.trials import JUDGED_BY, held_out_loss, unsearched

RUNGS = 5
SHARE = 4


class Search(Protocol):
    """What draws settings and stops trials; one trial runs at a time."""

    def draw(self) -> Setting:
        """The next trial's setting."""

    def report(self, rung: int, loss: float) -> None:
        """The trial's held-out loss at one of its `RUNGS` points, from 1 on."""

    def stops(self) -> bool:
        """Whether the trial ends with what it last reported; asked before its last point."""

    def ended(self, loss: float, complete: bool) -> None:
        """The trial is over, complete or stopped."""


class StoppedEarly(Contender):
    """Settings from the ranges of the task's sweep; the best model at the end of the budget is the result.

    A trial is a run of a quarter of the budget under its own cosine, judged by the held-out loss at five points of it.
    """

    order = 22

    @abstractmethod
    def search(self, task: Task, given: Setting, seed: int) -> Search:
        """A search of its own for each run."""

    def canonical(self, task: Task, setting: Setting) -> Setting:
        return unsearched(task, setting)

    def run(self, task: Task, setting: Setting, seed: int, meter: Meter) -> Outcome:
        search, trials = self.search(task, setting, seed), 0
        steps = task.steps // SHARE
        best: tuple[float, Problem, nn.Module | None, Setting] = (math.inf, task.problem(seed, 0.0), None, setting)
        every = -(-steps // RUNGS)
        while meter.passes + 3 * task.batch * every <= task.budget:
            drawn, trials = search.draw(), trials + 1
            problem, model = begin(task, drawn, seed, meter)
            loss, complete = _trained(search, task, problem, model, drawn, steps, every, meter)
            search.ended(loss, complete)
            if loss < best[0]:
                best = loss, problem, model, drawn
        return Outcome(best[2], best[1], {"lr": best[3].lr, "trials": trials})


def _trained(
    search: Search,
    task: Task,
    problem: Problem,
    model: nn.Module,
    setting: Setting,
    steps: int,
    every: int,
    meter: Meter,
) -> tuple[float, bool]:
    """The held-out loss where the trial ended, and whether that is its end."""
    optimizer = task.optimizer(problem.groups(model), setting)
    schedule = Cosine(peak=setting.lr, total_steps=steps, warmup=0.3)
    loss = math.inf
    for step in range(steps):
        if meter.passes + 3 * task.batch + JUDGED_BY > task.budget:
            return loss, False
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        problem.loss(model, problem.batch(step)).backward()
        update(task, optimizer)
        if (step + 1) % every == 0 or step == steps - 1:
            loss = held_out_loss(problem, model)
            if loss == math.inf:  # of which the search is told at its end alone
                return loss, False
            search.report(-(-(step + 1) // every), loss)
            if step < steps - 1 and search.stops():
                return loss, False
    return loss, True
