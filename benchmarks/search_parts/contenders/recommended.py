"""hdet's recommended recipe, as the README shows it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import hdet
from hdet.evidence import line
from hdet.history import WindowRecord
from hdet.schedules import Schedule
from search_parts.contender import Contender, Outcome, begin, step_replicas
from search_parts.meter import Meter
from search_parts.task import Problem, Setting, Task, split

TURN_OF = {"restored": "rewound"}
"""Where all replicas became non-finite the anchor comes back, and a guard has every controller retreat."""


class Recommended(Contender):
    """`hdet.recommended` with its defaults, told the length of the run and given the task's probe.

    Probes are paid for by training fewer steps. How many probes there will be depends a little on what they say:
    the run is planned with the least (at its end with the most), and ends when the budget is spent.
    """

    name = "hdet"
    title = "hdet, recommended"
    order = 1
    uses_library = True
    guard: hdet.Rewind | None = hdet.Rewind()
    tail: hdet.TailAverage | None = hdet.TailAverage()
    warmup_steps: int | None = None

    def prepare(self, task: Task, setting: Setting) -> None:
        self.affordable_steps(task, setting)

    def run(self, task: Task, setting: Setting, seed: int, meter: Meter) -> Outcome:
        steps = self.affordable_steps(task, setting)
        problem, model = begin(task, setting, seed, meter)

        def loss(model: nn.Module, batch: object) -> Tensor:
            return problem.example_losses(model, batch).view(task.sub_batches, -1).mean(dim=1)

        engine = self.engine(task, setting, problem, model, hdet.Probe(loss, lambda w: [problem.probe(w)]), steps, seed)
        at_the_end = self.at_the_end(problem)
        for step in range(steps):
            if meter.passes + 3 * task.batch + at_the_end > task.budget:
                engine.finish()  # more was probed than planned; the schedule is next to 0 here
                break
            step_replicas(task, engine, problem.loss, split(problem.batch(step), task.micro_batches))
        details = {
            "steps": engine.step_count,
            "peaks": {knob.name: knob.base(round(0.3 * steps)) for knob in engine.knobs},
            "closing": sum(record.closing for record in engine.history),
            "faults": sum(len(record.faults) for record in engine.history),
            "spoke": sorted(set(_spoke(engine.history))),
        }
        return Outcome(model, problem, details)

    def engine(
        self,
        task: Task,
        setting: Setting,
        problem: Problem,
        model: nn.Module,
        probe: hdet.Probe,
        steps: int,
        seed: int,
    ) -> hdet.Engine:
        """The recipe. A variant of it is a file with a subclass that overrides this, `knobs` or `schedule`."""
        optimizer = task.optimizer(problem.groups(model), setting)
        return hdet.recommended(
            model,
            optimizer,
            total_steps=steps,
            probe=probe,
            micro_batches=task.micro_batches,
            seed=seed,
            quiet=True,
            schedule=self.schedule(setting.lr, steps),
            warmup_steps=self.warmup_steps,
            knobs=self.knobs(model, optimizer, steps),
            guard=self.guard,
            tail=self.tail,
        )

    def schedule(self, peak: float, steps: int) -> Schedule | None:
        """Of the learning rate; None for the recipe's own."""
        return None

    def knobs(self, model: nn.Module, optimizer: Optimizer, steps: int) -> Sequence[hdet.Knob]:
        """What a variant declares otherwise than the recipe; the recipe itself nothing."""
        return ()

    def affordable_steps(self, task: Task, setting: Setting) -> int:
        """Steps that, with the probes that a run is planned with, cost no more than the budget."""
        # What is probed does not depend on the rates, only on whether there is decay and dropout at all.
        alike = Setting(task.grid.lrs[0], 1e-4 if setting.decay else 0.0, 0.1 if setting.dropout else 0.0)
        return _affordable(type(self), task.rehearsed(), alike)

    def at_the_end(self, problem: Problem) -> int:
        """Example-passes that the tail's probes take at the most, after the last step. They are paid for, too."""
        count = self.tail.most_evaluations(problem.model()) if self.tail is not None else 0
        return count * len(_first(problem.probe(0)))

    def rehearse(self, task: Task, setting: Setting, steps: int) -> int:
        """Example-passes that the recipe's probes take in a run of some steps.

        The engine runs with losses that only look at the weights, so no example goes through the model; the
        probes it asks for are counted. Of the tail's there are as many as can be: a schedule that the budget cuts off
        costs more than some steps less.
        """
        meter = Meter()
        problem = task.problem(0, setting.dropout)
        model = problem.model()
        size = len(_first(problem.probe(0)))
        scale = torch.linspace(1.0, 1.1, task.sub_batches)

        def weigh(model: nn.Module, batch: object) -> Tensor:
            return torch.stack([parameter.square().mean() for parameter in model.parameters()]).sum()

        def loss(model: nn.Module, batch: object) -> Tensor:
            meter.add(forward=size, backward=size if torch.is_grad_enabled() else 0)
            return weigh(model, batch) * scale

        bare = copy.copy(self)
        bare.tail = None
        engine = bare.engine(task, setting, problem, model, hdet.Probe(loss, lambda _: [None]), steps, 0)
        with patch.object(line, "STEEP", 1000.0):  # such losses may be steep where a task's are not
            for _ in range(steps):
                step_replicas(task, engine, weigh, [None] * task.micro_batches)
        return meter.passes + self.at_the_end(problem)


@lru_cache
def _affordable(kind: type[Recommended], task: Task, setting: Setting) -> int:
    step = 3 * task.batch
    steps = int(task.steps / (1.0 + kind().rehearse(task, setting, task.steps) / task.budget))
    # Windows do not shrink with the run, so it may take a little less than in proportion.
    while steps > 1 and (excess := steps * step + kind().rehearse(task, setting, steps) - task.budget) > 0:
        steps = max(1, steps + (-excess) // step)
    return steps


def _spoke(history: Iterable[WindowRecord]) -> Iterator[str]:
    """Every rule that asked for a move, every veto that held one back, and every turn of the guard."""
    for record in history:
        yield from (f"{knob}: {part}" for knob, parts in record.reasons.items() for part in parts.values())
        yield from (f"guard: {TURN_OF.get(fault['kind'], fault['kind'])}" for fault in record.faults)


def _first(batch: object) -> Tensor:
    return batch[0] if isinstance(batch, tuple) else batch  # type: ignore[return-value]


CONTENDER = Recommended()
