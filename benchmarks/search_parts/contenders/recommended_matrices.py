"""hdet's recommended recipe with a learning rate for each matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

import hdet
from hdet.recipes.recommended import choose, own_schedule
from hdet.schedules import Schedule
from search_parts.contenders.recommended import Recommended
from search_parts.task import Problem

OTHER_KNOBS = ("weight_decay", "dropout", "label_smoothing")


class RecommendedMatrices(Recommended):
    """The groups that `rates="matrices"` of `hdet.attach` makes, in the loop of the others."""

    name = "hdet_matrices"
    title = "hdet, a rate for each matrix"
    order = 2

    def groups(self, problem: Problem, model: nn.Module) -> list[dict[str, Any]]:
        names = {parameter: name for name, parameter in model.named_parameters()}
        found: list[dict[str, Any]] = []
        for group in problem.groups(model):
            cut: dict[str, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                cut.setdefault(names[parameter] if parameter.dim() >= 2 else "others", []).append(parameter)
            found += [{**group, "name": name, "params": own} for name, own in cut.items()]
        return found

    def knobs(self, model: nn.Module, optimizer: Optimizer, steps: int) -> Sequence[hdet.Knob]:
        courses: dict[Any, Schedule] = {
            group["name"]: own_schedule(optimizer, steps, index) for index, group in enumerate(optimizer.param_groups)
        }
        choices = choose(model, optimizer, steps, rates=courses, exclude=OTHER_KNOBS)
        return [choice.knob for choice in choices if choice.knob is not None]


CONTENDER = RecommendedMatrices()
