"""The loop that is written for an engine, with a loss for each replica and step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

import hdet


def train(
    engine: hdet.Engine,
    until: int | None = None,
    *,
    loss: Callable[[Any, int, int], Tensor],
    before: Callable[[int], object] = lambda step: None,
    watch: Callable[[Any], object] = lambda model: None,
    before_update: Callable[[Optimizer], object] = lambda optimizer: None,
    stepped: Callable[[int], object] = lambda step: None,
    report: Callable[[int, Tensor], Tensor] = lambda step, own: own,
    tell: Callable[[int, list[Tensor]], Any] = lambda step, losses: losses,
) -> list[hdet.history.WindowRecord]:
    """The windows that close until a step, by default the run's end.

    Args:
        loss: of a replica's model, at a step, by the replica's number.
        before, stepped: called before a step's first pass, and after its optimizers' steps.
        watch: is shown each model in its pass.
        before_update: is shown each optimizer before its step.
        report: what the engine is told of a replica's loss.
        tell: what it is told of them all.
    """
    records = []
    last = engine.total_steps if until is None else until
    assert last is not None
    for step in range(engine.step_count, last):
        before(step)
        losses = []
        for replica in engine.replicas:
            with replica:
                watch(replica.model)
                own = loss(replica.model, step, replica.index)
                own.backward()
            losses.append(report(step, own.detach()))
        engine.share_gradients()
        for optimizer in engine.optimizers:
            before_update(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        stepped(step)
        record = engine.step(tell(step, losses))
        if record is not None:
            records.append(record)
    return records
