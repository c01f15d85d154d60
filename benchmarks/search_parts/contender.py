"""A contender: whatever a user could do with one training run's compute and badly set hyperparameters."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import hdet
from search_parts.meter import Meter
from search_parts.task import Problem, Setting, Task

CHECK_EVERY = 20


@dataclass(frozen=True)
class Outcome:
    """What a contender hands in: the trained model, and what it wants kept. `None` says that it failed."""

    model: nn.Module | None
    problem: Problem
    details: Mapping[str, Any] = field(default_factory=dict)


class Contender(ABC):
    """One way to train.

    Attributes:
        name: of its results. title: for people.
        order: where it stands in tables.
        adaptive: whether it claims to find settings by itself.
        needs: the package that not everybody has installed; its own extra brings it.
        uses_library: whether its runs may change with the library.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    order: ClassVar[int] = 50
    adaptive: ClassVar[bool] = True
    needs: ClassVar[str | None] = None
    uses_library: ClassVar[bool] = False

    @abstractmethod
    def run(self, task: Task, setting: Setting, seed: int, meter: Meter) -> Outcome:
        """Train from a setting, within `task.budget` example-passes on models that the meter watches."""

    def prepare(self, task: Task, setting: Setting) -> None:  # noqa: B027
        """Planning that is not to count among the run's seconds; no example goes through a model."""

    def canonical(self, task: Task, setting: Setting) -> Setting:
        """The setting with what is ignored here made equal, so that equal runs are made once."""
        return setting


def begin(task: Task, setting: Setting, seed: int, meter: Meter) -> tuple[Problem, nn.Module]:
    """A problem and its watched model; dropout's masks, drawn from torch's generator, follow the seed."""
    problem = task.problem(seed, setting.dropout)
    model = problem.model()
    meter.watch(model)
    torch.manual_seed(seed)
    return problem, model


def train(
    task: Task,
    problem: Problem,
    model: nn.Module,
    optimizer: Optimizer,
    steps: int,
    schedule: Callable[[int], float] | None = None,
) -> nn.Module | None:
    """Plain training. Returns the model, or None once a loss is not finite.

    Args:
        schedule: the learning rate of all groups, times the `factor` of those that have one.
    """
    model.train()
    for step in range(steps):
        if schedule is not None:
            for group in optimizer.param_groups:
                group["lr"] = schedule(step) * group.get("factor", 1.0)
        loss = problem.loss(model, problem.batch(step))
        loss.backward()
        update(task, optimizer)
        if (step % CHECK_EVERY == 0 or step == steps - 1) and not math.isfinite(float(loss.detach())):
            return None
    return model


def update(task: Task, optimizer: Optimizer) -> None:
    """Clip, step and clear the gradients of one optimizer."""
    if task.clip is not None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], task.clip)
    optimizer.step()
    optimizer.zero_grad()


def step_replicas(
    task: Task, engine: hdet.Engine, loss: Callable[[nn.Module, Any], Tensor], batches: Sequence[Any]
) -> None:
    """A step of the loop that is written for an engine; each replica takes the batch of its index."""
    losses = []
    for replica in engine.replicas:
        with replica:
            own = loss(replica.model, batches[replica.index])
            own.backward()
        losses.append(own.detach())
    engine.share_gradients()
    for optimizer in engine.optimizers:
        update(task, optimizer)
    engine.step(losses)
