"""The learning rate of a narrow model, carried over to the wide one by the rules of muP."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from hdet.schedules import Cosine
from search_parts.contender import Contender, Outcome, begin, train
from search_parts.meter import Meter
from search_parts.task import Setting, Task
from search_parts.trials import examples_judged_by, held_out_loss

NARROWER = 4
RATES = 5
SHARE = 0.25


class WidthTransfer(Contender):
    """Trials of a model a quarter as wide, then one run of the wide model at the best of their rates.

    A quarter of the budget pays for five rates, over the range of the task's sweep in equal ratios. Each trial has a
    cosine of its own and is judged by the held-out loss. A narrow model's passes count by its share of the wide one's
    parameters. Then a parameter's rate goes with width as in muP (Yang et al. 2022, arXiv:2203.03466, table 3), by the
    factors i and o that its inputs and outputs grow by: with Adam 1 / i, with SGD o / i. First weights and forward pass
    stay the model's own, which is a simpler form than muP's. A task that has no narrower model is trained as it is
    given.
    """

    name = "width_transfer"
    title = "muP's rules, from a quarter of the width"
    order = 23

    def canonical(self, task: Task, setting: Setting) -> Setting:
        return setting if task.narrowed(NARROWER) is None else replace(setting, lr=1.0)

    def run(self, task: Task, setting: Setting, seed: int, meter: Meter) -> Outcome:
        narrow = task.narrowed(NARROWER)
        problem, model = begin(task, setting, seed, meter)
        groups, rate = problem.groups(model), setting.lr
        if narrow is not None:
            smaller = narrow.problem(seed, setting.dropout).model()
            share = _size(smaller) / _size(model)
            rate = _best_rate(narrow, setting, seed, meter, share)
            groups = transferred(groups, model, smaller, task.family)
        steps = (task.budget - meter.passes) // (3 * task.batch)
        torch.manual_seed(seed)
        optimizer = task.optimizer(groups, Setting(rate, setting.decay, setting.dropout))
        trained = train(task, problem, model, optimizer, steps, Cosine(peak=rate, total_steps=steps, warmup=0.3))
        return Outcome(trained, problem, {"lr": rate})


def transferred(groups: list[dict[str, Any]], model: nn.Module, narrow: nn.Module, family: str) -> list[dict[str, Any]]:
    """Parameter groups with the `factor` of their rate that the wider model wants, if 1 is the narrow one's."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    factors: dict[int, float] = {}
    for wide, small in zip(model.parameters(), narrow.parameters(), strict=True):
        sizes = [a / b for a, b in zip(wide.shape, small.shape, strict=True)][:2]
        if wide.dim() < 2 or id(wide) in embeddings:  # no input of theirs is wider
            inputs, outputs = 1.0, sizes[-1]
        else:
            outputs, inputs = sizes
        factors[id(wide)] = (1.0 if family == "adamw" else outputs) / inputs
    found: list[dict[str, Any]] = []
    for group in groups:
        for factor in sorted({factors[id(parameter)] for parameter in group["params"]}):
            own = [parameter for parameter in group["params"] if factors[id(parameter)] == factor]
            found.append({**group, "name": f"{group.get('name', '')} x{factor:g}", "params": own, "factor": factor})
    return found


def _best_rate(narrow: Task, setting: Setting, seed: int, meter: Meter, share: float) -> float:
    """Of those tried, the one whose trial ended best; what they cost is charged."""
    lrs = narrow.grid.lrs
    budget = SHARE * narrow.budget / RATES / share
    found: list[tuple[float, float]] = []
    for rate in np.geomspace(min(lrs), max(lrs), RATES).tolist():
        counted = Meter()
        problem, model = begin(narrow, setting, seed, counted)
        steps = math.floor((budget - examples_judged_by(problem)) / (3 * narrow.batch))
        steps = max(1, min(narrow.steps, steps))
        optimizer = narrow.optimizer(problem.groups(model), Setting(rate, setting.decay, setting.dropout))
        trained = train(narrow, problem, model, optimizer, steps, Cosine(peak=rate, total_steps=steps, warmup=0.3))
        found.append((held_out_loss(problem, trained), rate))
        meter.add(forward=math.ceil(counted.forward * share), backward=math.ceil(counted.backward * share))
    return min(found)[1]


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


CONTENDER = WidthTransfer()
