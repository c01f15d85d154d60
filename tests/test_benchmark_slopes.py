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


def test_a_probe_leaves_the_weights_as_they_were() -> None:
    model = nn.Linear(3, 1, bias=False)
    before = model.weight.detach().clone()
    first, update = [torch.zeros(1, 3)], [torch.rand(1, 3)]
    free_slopes.probed(Straight(), model, list(model.parameters()), first, update, 0)
    assert torch.equal(model.weight, before)
    assert model.training


def test_the_next_step_is_read_at_the_weights_of_the_windows_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """On (w - 1)^2 by SGD w - 1 shrinks by a known factor in each step, and so does the slope."""

    class Bowl(Straight):
        def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
            return (model.weight[0, 0] - 1.0).square()  # type: ignore[no-any-return,index]

        def example_losses(self, model: nn.Module, batch: Tensor) -> Tensor:
            return self.loss(model, batch)[None]

    class BowlTask(StraightTask):
        momentum = 0.0

        def problem(self, seed: int, dropout: float) -> Problem:
            return Bowl()

    task = BowlTask("bowl", "", steps=60, batch=1, family="sgd", ignorance=0.0, grid=Grid((0.1,), (0.0,)), starts=())
    monkeypatch.setitem(free_slopes.BEST, "bowl", Setting(1e-3, 0.0, 0.0))
    (first, *_) = list(free_slopes.readings(task, 1.0, 0, 0.5))
    assert first.steps[0] == pytest.approx(first.large, rel=0.02)  # the loss hardly bends over so small an update
    factors = [later / earlier for earlier, later in zip(first.steps, first.steps[1:], strict=False)]
    warm_up = [free_slopes.LinearDecay(peak=1e-3, total_steps=60, warmup=0.3)(step) for step in (10, 11)]
    assert factors == pytest.approx([1.0 - 2.0 * rate for rate in warm_up], rel=1e-5)
