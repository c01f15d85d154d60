"""Rates that a loop writes itself, by a function of the step that hdet is given, and by timm's schedulers."""

from __future__ import annotations

import copy
import importlib.util
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attach_parts import STEPS, adamw, batch, loss_of, network, probe
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import hdet
from hdet.controllers import Hold
from hdet.errors import ConfigError, StepError
from hdet.spreads import TwoLevel

BASES = (3e-3, 1e-3)
HELD = [
    hdet.LearningRate(controller=Hold()),
    hdet.WeightDecay(controller=Hold()),
    hdet.Dropout(controller=Hold(), spread=TwoLevel(0.0)),
]


def factor(step: int) -> float:
    """Up in ten steps, and down by half a cosine."""
    return min(1.0, (step + 1) / 10) * 0.5 * (1.0 + math.cos(math.pi * step / STEPS))


def rates(step: int) -> list[float]:
    return [base * factor(step) for base in BASES]


class Job:
    """A loop that writes its rates before each step, as many do."""

    def __init__(self, scheduler: Any = rates, **options: Any) -> None:
        self.model = network()
        self.optimizer = adamw(self.model)
        self.search: hdet.Search | None = None
        if scheduler is not None:
            options = {"probe": probe(), "total_steps": STEPS, "window": 4, "quiet": True, **options}
            self.search = hdet.attach(self.model, self.optimizer, scheduler=scheduler, **options)

    def train(
        self,
        start: int = 0,
        stop: int = STEPS,
        write: Callable[[int], list[float]] = rates,
        skipped: tuple[int, ...] = (),
    ) -> Job:
        for step in range(start, stop):
            for group, rate in zip(self.optimizer.param_groups, write(step), strict=True):
                group["lr"] = rate
            torch.manual_seed(step)
            loss = loss_of(self.model, batch(step))
            if self.search is not None:
                self.search.loss(loss)
            loss.backward()
            if step not in skipped:
                self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def left(self) -> Any:
        return copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()])

    def learned(self) -> dict[str, float | None]:
        assert self.search is not None
        return {name: shift.factor for name, shift in self.search.shifts.items()}


def test_held_it_is_the_loop_without_it_bit_for_bit(assert_same: Any) -> None:
    assert_same(Job(None).train().left(), Job(knobs=HELD, guard=None, tail=None).train().left())


def test_one_rate_for_all_groups_is_a_number(assert_same: Any) -> None:
    def one(step: int) -> float:
        return 3e-3 * factor(step)

    def write(step: int) -> list[float]:
        return 2 * [one(step)]

    plain = Job(None).train(write=write)
    assert_same(plain.left(), Job(one, knobs=HELD, guard=None, tail=None).train(write=write).left())


def test_it_is_looked_ahead_at_as_a_scheduler_of_torchs(assert_same: Any) -> None:
    """The same function as a LambdaLR, which writes what comes next after each step."""
    foretold = Job().train()
    model = network()
    optimizer = adamw(model)
    scheduler = LambdaLR(optimizer, factor)
    options = {"probe": probe(), "total_steps": STEPS, "window": 4, "quiet": True}
    search = hdet.attach(model, optimizer, scheduler=scheduler, **options)
    for step in range(STEPS):
        torch.manual_seed(step)
        search.loss(loss_of(model, batch(step))).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert_same(foretold.model.state_dict(), model.state_dict())
    assert foretold.learned() == {name: shift.factor for name, shift in search.shifts.items()}
    assert foretold.learned()["learning_rate"] != 1.0


def test_steps_that_a_scaler_skips_are_counted_by_the_loop_alone() -> None:
    job = Job().train(skipped=(0, 1, 2, 12))
    assert job.search is not None
    assert job.search.engine.step_count == STEPS - 4


def test_a_long_plateau_is_counted_through() -> None:
    def plateau(step: int) -> list[float]:
        return [base * (1.0 if step < STEPS - 3 else 0.1) for base in BASES]

    job = Job(plateau, warmup_steps=0).train(write=plateau)
    assert job.search is not None
    assert job.search.finished


def test_a_resume_in_mid_window_is_the_same_run(assert_same: Any) -> None:
    whole = Job().train(stop=10)
    saved = copy.deepcopy([whole.model.state_dict(), whole.optimizer.state_dict(), whole.search.state_dict()])
    whole.train(10)
    again = Job()
    for part, state in zip((again.model, again.optimizer, again.search), saved, strict=True):
        part.load_state_dict(state)
    again.train(10)
    assert_same(whole.left(), again.left())
    assert whole.learned() == again.learned()


def test_rates_held_as_float32_tensors_are_found_again() -> None:
    job = Job()
    for group in job.optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])

    def write(step: int) -> Any:
        return [torch.tensor(rate) for rate in rates(step)]

    assert job.train(write=write).search.finished


def test_another_rate_than_was_foretold_is_said() -> None:
    with pytest.raises(StepError, match=r"at step 3 are .* where scheduler=rates foretold .* that optimizer step"):
        Job().train(write=lambda step: [2 * rate if step == 3 else rate for rate in rates(step)])


@pytest.mark.parametrize("as_given", [np.array, np.float32, torch.tensor])
def test_numbers_of_other_libraries_are_rates(as_given: Callable[[float], Any]) -> None:
    def write(step: int) -> list[float]:
        return 2 * [float(as_given(3e-3 * factor(step)))]

    job = Job(lambda step: as_given(3e-3 * factor(step))).train(write=write)
    assert job.search is not None
    assert job.search.finished


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda step: [1e-3], r"gives \[0.001\] for step 0; it is asked for the learning rate that the loop writes"),
        (lambda step: 1e-3 * (10 - step), r"gives -0.001 for step 11"),
        (lambda step: None, "gives None for step 0"),
        (lambda step: "fast", "gives 'fast' for step 0"),
        (lambda step: math.nan, "gives nan for step 0"),
        (LambdaLR, "or a function of the step that tells what the loop writes, got the class LambdaLR"),
        (hdet.schedules.Cosine(1e-3, total_steps=STEPS), "got Cosine; give schedule=None"),
    ],
)
def test_what_foretells_no_rates_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Job(given)


def test_a_function_is_given_the_step_itself() -> None:
    with pytest.raises(ConfigError, match="a function is given the step"):
        Job(scheduler_every=5)


@pytest.fixture(scope="module")
def timm() -> Any:
    """timm's schedulers, without its models, which need torchvision."""
    spec = importlib.util.find_spec("timm")
    if spec is None:
        pytest.skip("timm is not installed")
    loaded = set(sys.modules)
    sys.modules["timm"] = importlib.util.module_from_spec(spec)
    yield importlib.import_module("timm.scheduler")
    for name in set(sys.modules) - loaded:
        del sys.modules[name]


@pytest.mark.parametrize("by_epochs", [False, True])
def test_timms_schedulers_are_looked_ahead_at(timm: Any, by_epochs: bool, assert_same: Any) -> None:
    each = 5

    def trained(attached: bool, **options: Any) -> tuple[nn.Module, Any]:
        model = network()
        optimizer = adamw(model)
        for group, scale in zip(optimizer.param_groups, (0.5, 1.0), strict=True):
            group["lr_scale"] = scale  # as by layer_decay=
        scheduler, _ = timm.create_scheduler_v2(
            optimizer,
            num_epochs=STEPS // each,
            warmup_epochs=2,
            warmup_lr=1e-5,
            step_on_epochs=by_epochs,
            updates_per_epoch=each,
            noise=(0.4, 0.9),
        )
        search = None
        if attached:
            options = {"probe": probe(), "total_steps": STEPS, "window": 4, "quiet": True, **options}
            every = each if by_epochs else 1
            search = hdet.attach(model, optimizer, scheduler=scheduler, scheduler_every=every, **options)
        for step in range(STEPS):
            torch.manual_seed(step)
            loss = loss_of(model, batch(step))
            if search is not None:
                search.loss(loss)
            loss.backward()
            optimizer.step()
            scheduler.step_update(step + 1)
            if (step + 1) % each == 0:
                scheduler.step((step + 1) // each)
            optimizer.zero_grad()
        return model, search

    assert_same(trained(False)[0].state_dict(), trained(True, knobs=HELD, guard=None, tail=None)[0].state_dict())
    search = trained(True)[1]
    assert search.finished
    assert search.shifts["learning_rate"].factor != 1.0


def test_timms_schedulers_that_cannot_be_foreseen_are_refused(timm: Any) -> None:
    model = network()
    optimizer = adamw(model)
    scheduler, _ = timm.create_scheduler_v2(optimizer, num_epochs=8)
    options = {"probe": probe(), "total_steps": STEPS, "quiet": True}
    with pytest.raises(ConfigError, match="goes by epochs; give scheduler_every="):
        hdet.attach(model, optimizer, scheduler=scheduler, **options)
    with pytest.raises(ConfigError, match="the scheduler belongs to another optimizer"):
        hdet.attach(model, adamw(model), scheduler=scheduler, scheduler_every=5, **options)
    with pytest.warns(FutureWarning):
        plateau, _ = timm.create_scheduler_v2(optimizer, sched="plateau", num_epochs=8)
    with pytest.raises(ConfigError, match="waits for a metric, so nobody knows where it goes; give schedule=None"):
        hdet.attach(model, optimizer, scheduler=plateau, scheduler_every=5, **options)
