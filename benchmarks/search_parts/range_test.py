"""The learning-rate range test, as fastai's and Lightning's `lr_find` do it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import nn

from hdet.schedules import Cosine, OneCycle
from search_parts.contender import Contender, Outcome, begin, train, update
from search_parts.meter import Meter
from search_parts.option import named
from search_parts.task import Problem, Setting, Task

STEPS = 100
FASTAI, LIGHTNING = (1e-7, 10.0), (1e-8, 1.0)
SCHEDULES: tuple[Literal["onecycle", "cosine"], ...] = ("onecycle", "cosine")
SMOOTHING = 0.98
TOO_HIGH = 4.0
Curve = NDArray[np.float64]


def swept(
    task: Task, problem: Problem, model: nn.Module, setting: Setting, ends: tuple[float, float]
) -> tuple[Curve, Curve]:
    """Rates and smoothed training losses of a copy of the model, trained at a rate that each step raises by a factor.

    Smith 2015 (arXiv:1506.01186), by the defaults that fastai and Lightning share: 100 steps, an exponential mean of
    0.98 without its bias, and the end where that is four times its lowest value. Their first and last rates differ.
    """
    tried = copy.deepcopy(model).train()
    optimizer = task.optimizer(problem.groups(tried), setting)
    rates, losses, mean = [], [], 0.0
    for step in range(STEPS):
        rate = ends[0] * (ends[1] / ends[0]) ** (step / (STEPS - 1))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = problem.loss(tried, problem.batch(step))
        loss.backward()
        update(task, optimizer)
        mean = SMOOTHING * mean + (1 - SMOOTHING) * float(loss.detach())
        smoothed = mean / (1 - SMOOTHING ** (step + 1))
        if not math.isfinite(smoothed):
            break
        rates.append(rate)
        losses.append(smoothed)
        if smoothed > TOO_HIGH * min(losses):
            break
    return np.array(rates), np.array(losses)


def valley(rates: Curve, losses: Curve) -> float:
    """fastai's default: half-way down the longest sequence of ever lower losses (the middle of its second third)."""
    rates, losses = rates[STEPS // 10 : -5], losses[STEPS // 10 : -5]
    lengths, end = [1] * len(losses), 0
    for i in range(1, len(losses)):
        lengths[i] = 1 + max((lengths[j] for j in range(i) if losses[i] < losses[j]), default=0)
        end = i if lengths[i] > lengths[end] else end
    start = end - lengths[end] if end else 0  # fastai's start where no loss falls
    third = (end - start) / 3
    return float(rates[start + int(third) + int(third / 2)])


def steepest(rates: Curve, losses: Curve) -> float:
    """Lightning's: the steepest descent of the loss over the rate, the first 10 points and the last left out."""
    rates, losses = rates[10:-1], losses[10:-1]
    return float(rates[np.gradient(losses, rates).argmin()])


def tenth_of_lowest(rates: Curve, losses: Curve) -> float:
    """fastai's `minimum`, the oldest rule: a tenth of the rate with the lowest loss."""
    return float(rates[STEPS // 10 : -5][losses[STEPS // 10 : -5].argmin()]) / 10


RULES: Mapping[str, tuple[Callable[[Curve, Curve], float], tuple[float, float]]] = {
    "valley": (valley, FASTAI),
    "steepest": (steepest, LIGHTNING),
    "tenth": (tenth_of_lowest, FASTAI),
}


class RangeTest(Contender):
    """A range test, then the run at the rate it suggests, with what is left of the budget.

    Args:
        rule: how a rate is read off the curve. schedule: of the run. factor: on what the rule suggests.
    """

    order = 13

    def __init__(self, rule: str, schedule: Literal["onecycle", "cosine"], factor: float = 1.0) -> None:
        self.name = named(f"range_{rule}_{schedule}", factor, 1.0)  # type: ignore[misc]
        self.title = f"range test ({rule}), then {schedule}"  # type: ignore[misc]
        self.rule, self.schedule, self.factor = rule, schedule, factor

    def canonical(self, task: Task, setting: Setting) -> Setting:
        return replace(setting, lr=1.0)

    def run(self, task: Task, setting: Setting, seed: int, meter: Meter) -> Outcome:
        problem, model = begin(task, setting, seed, meter)
        rule, ends = RULES[self.rule]
        rate = self.factor * rule(*swept(task, problem, model, setting, ends))
        steps = (task.budget - meter.passes) // (3 * task.batch)
        made = OneCycle(rate, total_steps=steps) if self.schedule == "onecycle" else Cosine(rate, steps, warmup=0.3)
        optimizer = task.optimizer(problem.groups(model), setting)
        trained = train(task, problem, model, optimizer, steps, made)
        return Outcome(trained, problem, {"lr": rate})
