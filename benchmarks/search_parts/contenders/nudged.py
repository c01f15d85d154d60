"""The fixed cosine once more, from first weights that differ by a millionth: what chance alone does to a run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from search_parts.contender import Outcome, begin, train
from search_parts.contenders.cosine import FixedCosine
from search_parts.meter import Meter
from search_parts.task import Setting, Task

NUDGE = 1e-6


class NudgedCosine(FixedCosine):
    """Training is chaotic: runs that differ in the last digits end apart, like runs that nothing was done to.

    So this contender's share of hurt runs is what a search would have that neither helps nor harms.
    """

    name = "nudged"
    title = "fixed cosine, nudged"
    order = 11

    def run(self, task: Task, setting: Setting, seed: int, meter: Meter) -> Outcome:
        problem, model = begin(task, setting, seed, meter)
        nudge(model, seed)
        optimizer = task.optimizer(problem.groups(model), setting)
        trained = train(task, problem, model, optimizer, task.steps, self.schedule(setting.lr, task.steps))
        return Outcome(trained, problem)


def nudge(model: nn.Module, seed: int) -> None:
    """Multiply every weight by 1 + 1e-6 z, z standard normal; torch's own generator is left alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise: Tensor = torch.randn(parameter.shape, generator=generator)
            parameter.mul_(1.0 + NUDGE * noise)


CONTENDER = NudgedCosine()
