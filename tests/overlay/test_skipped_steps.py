"""Steps that a loss scaler skips, as a DeepSpeed engine's optimizer tells of them: only after the fact."""

from __future__ import annotations

import math

import pytest
import torch
from attach_parts import STEPS, batch, loss_of, network, probe

import hdet
from hdet.integrations.deepspeed import EngineOptimizer

PASSES = 4


class LossScaled:
    """What DeepSpeed keeps around an optimizer in half precision: it steps, unless a gradient overflowed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.overflow = False

    def step(self) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.overflow = not all(bool(p.grad.isfinite().all()) for p in parameters)
        if not self.overflow:
            self.optimizer.step()


@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_the_scale_of_the_losses_is_found_after_steps_that_overflowed(skipped: int) -> None:
    model = network()
    wrapped = LossScaled(torch.optim.AdamW(model.parameters(), lr=1e-3))
    groups = [list(model.parameters())]
    optimizer = EngineOptimizer(wrapped, groups, masters=lambda: groups)
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, micro_batches=PASSES, quiet=True)
    for step in range(skipped + 3):
        scale = math.inf if step < skipped else 1.0
        for part in range(PASSES):
            loss = scale * loss_of(model, batch(step, part)) / PASSES
            search.loss(loss).backward()
        wrapped.step()
        model.zero_grad()
    assert search.engine.step_count == 3
    assert search.state_dict()["losses"]["divided"]
