"""Prodigy (Mishchenko and Defazio 2024, arXiv:2306.06101): an Adam that estimates its own step size."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from dataclasses import replace

from prodigyopt import Prodigy

from hdet.schedules import Cosine
from search_parts.contender import Contender, Outcome, begin, train
from search_parts.meter import Meter
from search_parts.option import Option, named
from search_parts.task import Setting, Task


class ProdigyContender(Contender):
    """lr = 1 wherever the run starts, as its authors ask: a badly set learning rate cannot hurt it.

    Cosine annealing without warm-up, bias correction on, decoupled decay, which are their recommendations.

    Args:
        d_coef: factor on its estimate, the option that they ask to try first.
    """

    order = 30

    def __init__(self, d_coef: float = 1.0) -> None:
        self.name = named("prodigy", d_coef, 1.0)  # type: ignore[misc]
        self.title = "Prodigy"  # type: ignore[misc]
        self.d_coef = d_coef

    def canonical(self, task: Task, setting: Setting) -> Setting:
        return replace(setting, lr=1.0)

    def run(self, task: Task, setting: Setting, seed: int, meter: Meter) -> Outcome:
        problem, model = begin(task, setting, seed, meter)
        with redirect_stdout(io.StringIO()):  # it prints that its decay is decoupled
            optimizer = Prodigy(
                problem.groups(model),
                lr=setting.lr,
                betas=task.betas if task.family == "adamw" else (0.9, 0.999),
                weight_decay=setting.decay,
                d_coef=self.d_coef,
                decouple=True,
                use_bias_correction=True,
            )
        schedule = Cosine(peak=setting.lr, total_steps=task.steps, warmup=0.0)
        trained = train(task, problem, model, optimizer, task.steps, schedule)
        return Outcome(trained, problem, {"d": float(optimizer.param_groups[0]["d"])})


CONTENDER = ProdigyContender()
OPTION = Option("d_coef", (ProdigyContender(0.5), CONTENDER, ProdigyContender(2.0)))
