"""A user's scheduler, simulated on a copy: what cannot be foreseen is said, and nothing of the user's is copied."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from attach_parts import STEPS, adamw, batch, loss_of, network, probe
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, SequentialLR

import hdet
from hdet.errors import ConfigError, StepError
from hdet.overlay.rates import Rates


class Trainer:
    """Owns a model, which is not to be copied, and says how far a warm-up has got."""

    def __init__(self) -> None:
        self.calls = 0

    def __deepcopy__(self, memo: Any) -> Trainer:
        raise AssertionError("a trainer was copied")

    def warm_up(self, step: int) -> float:
        return min(1.0, (step + 1) / 10)

    def counted(self, step: int) -> float:
        self.calls += 1
        return min(1.0, self.calls / 1000)


class Counting:
    """An object may keep a count of its own: a copy of it is simulated."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return min(1.0, self.calls / 1000)


def attached(make: Callable[[torch.optim.Optimizer], Any], per_epoch: int | None = None) -> hdet.Search:
    """Four steps; `per_epoch` of them, where given, are one of the scheduler."""
    model = network()
    optimizer = adamw(model)
    scheduler = make(optimizer)
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, scheduler=scheduler, quiet=True, window=5)
    for step in range(4):
        search.loss(loss_of(model, batch(step))).backward()
        optimizer.step()
        if per_epoch is None:
            scheduler.step()
        else:
            scheduler.step((step + 1) / per_epoch)
        optimizer.zero_grad()
    return search


def test_the_owner_of_a_method_is_not_copied() -> None:
    search = attached(lambda optimizer: LambdaLR(optimizer, Trainer().warm_up))
    assert search.engine.knobs[0].schedule(8) == pytest.approx(0.9 * 3e-3)
    attached(lambda optimizer: LambdaLR(optimizer, partial(Trainer.warm_up, Trainer())))


@pytest.mark.parametrize("nested", [False, True])
def test_a_function_that_keeps_a_count_is_refused_by_name(nested: bool) -> None:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        scheduler = LambdaLR(optimizer, Trainer().counted)
        return SequentialLR(optimizer, [scheduler, LambdaLR(optimizer, float)], [30]) if nested else scheduler

    with pytest.raises(ConfigError, match=r"Trainer\.counted, which .* asks for the rate, gave .* a count of its own"):
        attached(make)


def test_a_scheduler_that_cannot_be_copied_is_refused() -> None:
    counting = Counting()
    counting.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="LambdaLR cannot be copied, and so not be simulated ahead"):
        attached(lambda optimizer: LambdaLR(optimizer, counting))


def test_an_object_that_keeps_a_count_is_simulated_on_a_copy() -> None:
    counting = Counting()
    search = attached(lambda optimizer: LambdaLR(optimizer, counting))
    assert counting.calls == 2 * (1 + 4)  # for two groups, as it was made and at each step
    assert search.engine.step_count == 4


def test_steps_by_fractions_of_an_epoch_are_said() -> None:
    attached(lambda optimizer: CosineAnnealingWarmRestarts(optimizer, T_0=10))
    with pytest.raises(StepError, match="stepped by fractions of an epoch"):
        attached(lambda optimizer: CosineAnnealingWarmRestarts(optimizer, T_0=10), per_epoch=4)


def test_a_rate_that_rises_is_taken_to_go_on_and_a_probability_is_not() -> None:
    """Adam's betas could leave their domain."""
    rates = Rates(adamw(network()), None, driven=False)
    for entry, values in ((("lr", None), [0.5, 1.25]), (("betas", 0), [0.8, 0.95])):
        course = rates.course(entry)
        course.told = {0: [values[0]], 1: [values[1]]}
        course.tell(1, [values[1]])
        assert course.at(2) == [2.0 if entry[0] == "lr" else 0.95]
