"""A rate whose first steps are huge: the recipe cuts it back after one window and begins anew."""

from __future__ import annotations

import copy
from typing import Any

import explicit_loop
import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import hdet
from hdet.windows import GrowingWindow

STEPS, WIDTH = 400, 256


def loss(model: Any, x: Tensor) -> Tensor:
    found: Tensor = (model(x).squeeze(-1) - x.sum(dim=1)).square()
    return found


def run(rate: float, windows: int, **options: Any) -> tuple[hdet.Engine, nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    first = copy.deepcopy(model.state_dict())
    held_out = torch.randn(64, 16).chunk(8)
    engine = hdet.recommended(
        model,
        AdamW(model.parameters(), lr=rate, weight_decay=0.1),
        total_steps=STEPS,
        probe=hdet.Probe(loss, held_out),
        quiet=True,
        **options,
    )
    drawn = lambda model, step, index: loss(model, torch.randn(32, 16)).mean()  # noqa: E731
    explicit_loop.train(engine, windows * GrowingWindow().minimum, loss=drawn)
    return engine, model, first


def test_a_rate_far_too_high_is_cut_back_and_the_run_begins_anew_after_one_window(assert_same: Any) -> None:
    engine, model, first = run(10.0, 1)
    (record,) = engine.history
    assert record.estimates["learning_rate"]["step_size"] > 12.0
    assert record.reasons["learning_rate"]["rule"] == "cut_back"
    assert [fault["kind"] for fault in record.faults] == ["restarted"]
    assert_same(model.state_dict(), first)


def test_it_goes_on_at_steps_that_are_not_huge_and_begins_anew_once() -> None:
    engine, *_ = run(10.0, 5)
    later = list(engine.history)[1:]
    assert [record.faults for record in later] == [[]] * 4
    sizes = [record.estimates["learning_rate"]["step_size"] for record in later]
    assert all(size is not None and size < 12.0 for size in sizes)


@pytest.mark.parametrize(("rate", "options"), [(0.01, {}), (10.0, {"exclude": ("learning_rate",)})])
def test_a_rate_that_may_be_meant_and_one_that_is_held_are_not(rate: float, options: dict[str, Any]) -> None:
    engine, *_ = run(rate, 2, **options)
    assert [record.reasons.get("learning_rate", {}).get("rule") for record in engine.history].count("cut_back") == 0
    assert [record.faults for record in engine.history] == [[]] * 2
