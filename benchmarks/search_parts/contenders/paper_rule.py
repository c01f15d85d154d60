"""The paper's algorithm with its errata corrected: diverging replicas, judged by their training loss."""

from __future__ import annotations

import hdet
from search_parts.contender import Contender, Outcome, begin, update
from search_parts.meter import Meter
from search_parts.task import Setting, Task, split

REPLICAS = 4
WINDOWS = 24


class PaperRule(Contender):
    """Four replicas, a quarter of the batch each, shared gradients, 24 windows; the paper's other settings.

    The replicas see one plain run's examples between them, so they cost one plain run.
    """

    name = "paper"
    title = "the paper's rule"
    order = 40

    def run(self, task: Task, setting: Setting, seed: int, meter: Meter) -> Outcome:
        problem, model = begin(task, setting, seed, meter)
        optimizer = task.optimizer(problem.groups(model), setting)
        engine = hdet.paper_engine(
            hdet.replicate(model, optimizer, n=REPLICAS),
            max_lr=setting.lr,
            total_steps=task.steps,
            window=max(1, task.steps // WINDOWS),
            seed=seed,
        )
        for step in range(task.steps):
            losses = []
            parts = split(problem.batch(step), REPLICAS)
            for replica in engine.replicas:
                with replica:
                    loss = problem.loss(replica.model, parts[replica.index])
                    loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
            engine.share_gradients()
            for own in engine.optimizers:
                update(task, own)
            engine.step(losses)
        return Outcome(engine.replicas[0].model, problem)


CONTENDER = PaperRule()
