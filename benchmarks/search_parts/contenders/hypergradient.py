"""Hypergradient descent (Baydin et al. 2018, arXiv:1703.04782): the rate follows the gradient of the loss in it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from search_parts.contender import CHECK_EVERY, Contender, Outcome, begin, update
from search_parts.meter import Meter
from search_parts.option import Option
from search_parts.task import Setting, Task

BETA = 0.02


class Hypergradient(Contender):
    """The multiplicative rule, whose step has no unit: rate <- rate (1 - beta cos(g_t, u_t-1)).

    g is the gradient, and u the move that the optimizer made in the step before, so that the rule serves SGD and Adam
    alike. No schedule, as in the paper.

    Args:
        beta: of the rule. 0.02 lets the rate change sevenfold in 100 steps that all agree.
    """

    order = 34

    def __init__(self, beta: float = BETA) -> None:
        self.name = f"hypergradient_{beta:g}"  # type: ignore[misc]
        self.title = "hypergradient descent"  # type: ignore[misc]
        self.beta = beta

    def run(self, task: Task, setting: Setting, seed: int, meter: Meter) -> Outcome:
        problem, model = begin(task, setting, seed, meter)
        optimizer = task.optimizer(problem.groups(model), setting)
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        before: list[torch.Tensor] = []
        for step in range(task.steps):
            loss = problem.loss(model, problem.batch(step))
            loss.backward()
            if step % CHECK_EVERY == 0 and not math.isfinite(float(loss.detach())):
                return Outcome(None, problem)
            if before:
                towards = _cosine(
                    [p.grad for p in trained], [p.detach() - b for p, b in zip(trained, before, strict=True)]
                )
                for group in optimizer.param_groups:
                    group["lr"] *= 1.0 - self.beta * towards
            before = [p.detach().clone() for p in trained]
            update(task, optimizer)
        return Outcome(model, problem, {"lr": optimizer.param_groups[0]["lr"]})


def _cosine(gradients: Sequence[torch.Tensor | None], moves: Sequence[torch.Tensor]) -> float:
    """Of the angle between two lists of tensors; 0 where one vanishes. What has no gradient is left out."""
    pairs = [(g, m) for g, m in zip(gradients, moves, strict=True) if g is not None]
    product = sum(float((g * m).sum()) for g, m in pairs)
    norm = math.sqrt(sum(float(g.square().sum()) for g, _ in pairs) * sum(float(m.square().sum()) for _, m in pairs))
    return product / norm if norm > 0.0 else 0.0


CONTENDER = Hypergradient()
OPTION = Option("beta", (Hypergradient(BETA / 4), CONTENDER, Hypergradient(4 * BETA)))
