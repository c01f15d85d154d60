"""Slopes of a learning rate by a probe and by the next steps' gradients, where both are known."""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import free_slopes
from search_parts.task import Grid, Problem, Setting, Task


class Straight(Problem):
    """A loss that is linear in the weights, so that every gradient is the same."""

    def model(self) -> nn.Module:
        return nn.Linear(3, 1, bias=False)

    def groups(self, model: nn.Module) -> list[dict[str, object]]:
        return [{"params": list(model.parameters())}]

    def batch(self, step: int) -> Tensor:
        return torch.tensor([[1.0, -2.0, 0.5]])

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).mean()  # type: ignore[no-any-return]

    def probe(self, window: int) -> Tensor:
        return self.batch(window)

    def example_losses(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch)[:, 0]  # type: ignore[no-any-return]

    def test_loss(self, model: nn.Module) -> float:
        return 0.0


class StraightTask(Task):
    def problem(self, seed: int, dropout: float) -> Problem:
        return Straight()


def test_both_are_the_update_along_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    task = StraightTask(
        "straight", "", steps=60, batch=1, family="sgd", ignorance=0.0, grid=Grid((0.1,), (0.0,)), starts=()
    )
    monkeypatch.setitem(free_slopes.BEST, "straight", Setting(0.1, 0.0, 0.0))
    found = list(free_slopes.readings(task, 1.0, 0, 0.5))
    assert [one.stop for one in found] == [10, 20]
    curved = math.sinh(free_slopes.WIDTH) / free_slopes.WIDTH  # e^x is no line in x
    for one in found:
        assert one.steps[0] < 0.0
        assert one.steps == pytest.approx([one.steps[0]] * free_slopes.READ)
        assert (one.probe, one.large) == pytest.approx((one.steps[0] * curved,) * 2, rel=1e-4)
