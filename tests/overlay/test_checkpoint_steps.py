"""Steps that are made for an optimizer to have its state, before one is saved or loaded, are none of training."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import hdet


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_state_asked_for_before_the_first_step_is_no_step(scheduled: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20) if scheduled else None
    probe = hdet.Probe(lambda model, x: model(x).square().mean(), [torch.randn(4, 2) for _ in range(8)])
    search = hdet.attach(model, optimizer, probe=probe, total_steps=20, scheduler=scheduler, window=5, quiet=True)
    get_state_dict(model, optimizer)
    assert search.engine.step_count == 0
    for _ in range(20):
        search.loss(model(torch.randn(4, 2)).square().mean()).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    assert search.finished
    assert len(search.history) == 4


@pytest.mark.parametrize("exclude", [[], ["dropout"]])
def test_so_is_one_that_a_framework_makes_at_the_rate_as_it_is(exclude: list[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    probe = hdet.Probe(lambda model, x: model(x).square().mean(), [torch.randn(4, 2) for _ in range(8)])
    search = hdet.attach(model, optimizer, probe=probe, total_steps=20, exclude=exclude, quiet=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.state
    assert search.engine.step_count == 0


def test_a_later_step_on_gradients_of_0_is_one_of_training() -> None:
    """Of an optimizer that holds no state, too."""
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    probe = hdet.Probe(lambda model, x: model(x).square().mean(), [torch.randn(4, 2) for _ in range(8)])
    search = hdet.attach(model.eval(), optimizer, probe=probe, total_steps=20, quiet=True)
    for scale in (1.0, 0.0):
        optimizer.zero_grad()
        (scale * model(torch.randn(8, 2)).square().mean()).backward()
        optimizer.step()
    assert search.engine.step_count == 2
