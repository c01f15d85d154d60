"""Rates that a loop writes itself, by a function of the step that hdet is given."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Container
from typing import Any

import numpy as np
import pytest
import torch
from attach_parts import HELD, STEPS, adamw, batch, loss_of, network, probe
from torch.optim.lr_scheduler import LambdaLR

import hdet
from hdet.errors import ConfigError, StepError
from hdet.overlay.foretold import Foretold
from hdet.overlay.rates import RATE, Rates
from hdet.overlay.told_schedule import Follower
from hdet.overlay.told_schedule import rates as held_rates

BASES = (3e-3, 1e-3)


def factor(step: int) -> float:
    """Up in ten steps, and down by half a cosine."""
    return min(1.0, (step + 1) / 10) * 0.5 * (1.0 + math.cos(math.pi * step / STEPS))


def rates(step: int) -> list[float]:
    return [base * factor(step) for base in BASES]


COUNTED = itertools.count()


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
        skipped: Container[int] = (),
        late: bool = False,
    ) -> Job:
        """Steps by the loop's count; `late` writes the rates after the backward pass."""
        for step in range(start, stop):
            if not late:
                self.put(write(step))
            torch.manual_seed(step)
            loss = loss_of(self.model, batch(step))
            if self.search is not None:
                self.search.loss(loss)
            loss.backward()
            if late:
                self.put(write(step))
            if step not in skipped:
                self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def put(self, rates: list[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def left(self) -> Any:
        return copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()])

    def learned(self) -> dict[str, float | None]:
        assert self.search is not None
        return {name: shift.factor for name, shift in self.search.shifts.items()}


@pytest.mark.parametrize("late", [False, True])
def test_held_it_is_the_loop_without_it_bit_for_bit(late: bool, assert_same: Any) -> None:
    """Whether rates are written before the forward pass or after the backward pass."""
    plain = Job(None).train(late=late)
    assert_same(plain.left(), Job(knobs=HELD, guard=None, tail=None).train(late=late).left())
    assert_same(Job().train().left(), Job().train(late=late).left())


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


def test_a_loop_that_counts_skipped_steps_may_go_on_past_the_end() -> None:
    def falling(step: int) -> list[float]:
        return [base * max(0.0, 1 - step / STEPS) for base in BASES]

    job = Job(falling).train(stop=STEPS + 2, write=falling, skipped=(5, STEPS - 1))
    assert job.search is not None
    assert job.search.finished


def test_steps_skipped_on_a_plateau_are_counted_as_it_ends() -> None:
    steps, skipped = 240, range(10, 190, 4)

    def plateau(step: int) -> list[float]:
        return [base * (1.0 if step < 200 else 0.1 + 0.9 * (240 - step) / 40) for base in BASES]

    job = Job(plateau, total_steps=steps, warmup_steps=0, window=40).train(stop=steps, write=plateau, skipped=skipped)
    assert job.search is not None
    assert job.search.engine.step_count == steps - len(skipped)


def test_rates_written_one_step_late_are_followed(assert_same: Any) -> None:
    def late(step: int) -> list[float]:
        return rates(max(0, step - 1))

    plain = Job(None).train(write=late)
    assert_same(plain.left(), Job(knobs=HELD, guard=None, tail=None).train(write=late).left())


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


def test_a_window_that_cannot_be_taken_up_is_gone_through_again() -> None:
    """Resumed under other windows, the search goes back to where the saved one opened, and the loop with it."""
    whole = Job(window=8).train(stop=21)
    assert whole.search is not None
    again = Job(window=5)
    assert again.search is not None
    for part, saved in ((again.model, whole.model), (again.optimizer, whole.optimizer)):
        part.load_state_dict(copy.deepcopy(saved.state_dict()))
    with pytest.warns(UserWarning, match="go on from there"):
        again.search.load_state_dict(whole.search.state_dict())
    assert again.search.engine.step_count == 16
    assert again.train(16).search.finished


def test_a_function_may_be_another_after_a_resume() -> None:
    """It is the loop's own, which has not saved it."""

    def slower(step: int) -> list[float]:
        return [rate / 2 for rate in rates(step)]

    whole = Job().train(stop=20)
    again = Job(slower)
    for part, saved in ((again.model, whole.model), (again.optimizer, whole.optimizer), (again.search, whole.search)):
        part.load_state_dict(copy.deepcopy(saved.state_dict()))
    assert again.search.engine.knobs[0].schedule(30) == slower(30)[0]
    assert again.train(20, write=slower).search.finished


def test_training_that_is_under_way_has_had_its_warm_up() -> None:
    job = Job(None).train(stop=10)
    search = hdet.attach(
        job.model,
        job.optimizer,
        probe=probe(),
        total_steps=STEPS - 10,
        scheduler=lambda step: rates(10 + step),
        quiet=True,
    )
    assert search.engine.knobs[0].schedule(0) == rates(10)[0]
    assert Job().search.engine.knobs[0].schedule(0) <= rates(0)[0]
    job.search = search
    assert job.train(10).search.finished


def test_rates_on_a_device_are_taken_as_foretold() -> None:
    """Reading them would wait for the device."""
    optimizer = adamw(network())
    scheduler = LambdaLR(optimizer, factor)
    for follower in (Foretold(rates, optimizer), Follower(scheduler, optimizer)):
        forecast = follower.forecast(STEPS, optimizer.param_groups, held_rates)
        found = Rates(optimizer, follower, driven=False, forecast=forecast)
        course = found.course(RATE)
        held = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = torch.empty((), device="meta")
        scheduler.last_epoch = 1
        found.tell(1)
        assert course.at(1) == pytest.approx(rates(1))
        scheduler.last_epoch = 0
        for group, rate in zip(optimizer.param_groups, held, strict=True):
            group["lr"] = rate


def test_a_rate_on_a_device_that_nobody_is_to_move_is_read_once_a_window() -> None:
    optimizer = torch.optim.AdamW(network().parameters(), lr=torch.tensor(1e-3))
    found = Rates(optimizer, None, driven=True)
    optimizer.param_groups[0]["lr"] = torch.empty((), device="meta")
    for step in range(5):
        found.tell(step, settled=False)
        found.tell(step)
    found.forget_before(5)
    with pytest.raises(RuntimeError, match="meta tensor"):
        found.tell(5, settled=False)
    optimizer.param_groups[0]["lr"] = torch.tensor(2e-3)
    with pytest.raises(StepError, match="brings a schedule of its own"):
        found.tell(5)


def test_rates_held_as_float32_tensors_are_found_again() -> None:
    job = Job()
    for group in job.optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])

    def write(step: int) -> Any:
        return [torch.tensor(rate) for rate in rates(step)]

    assert job.train(write=write).search.finished


def test_another_rate_than_was_foretold_is_said() -> None:
    with pytest.raises(
        StepError, match=r"at step 3 are .* where scheduler=rates foretold .* written when it makes that optimizer step"
    ):
        Job().train(write=lambda step: [2 * rate if step == 3 else rate for rate in rates(step)])


@pytest.mark.parametrize(("begin", "told_at"), [(1, 3), (0, 4)])
def test_a_wrong_function_is_not_taken_for_skipped_steps(begin: int, told_at: int) -> None:
    """Twice the rate is a rate of a later step in a linear warm-up, further ahead at each step."""

    def linear(step: int) -> list[float]:
        return [base * (begin + step) / 100 for base in BASES]

    with pytest.raises(StepError, match=f"at step {told_at} are"):
        Job(linear, micro_batches=1).train(write=lambda step: [2 * rate for rate in linear(step)])


def test_a_loop_may_count_a_loss_that_it_leaves_out_and_batches_that_no_pass_is_made_for() -> None:
    job = Job()
    assert job.search is not None
    for step in range(STEPS):
        job.put(rates(step))
        if step in (3, 15, 16, 17, 27):
            continue  # a bad batch
        loss = job.search.loss(loss_of(job.model, batch(step)))
        if step in (0, 1, 5):
            continue  # as where the loss is not finite
        loss.backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
    assert job.search.engine.step_count == STEPS - 8


def bfloat16(rate: float) -> torch.Tensor:
    return torch.tensor(rate, dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize("as_given", [np.array, np.float32, torch.tensor, bfloat16])
def test_numbers_of_other_libraries_are_rates(as_given: Callable[[float], Any]) -> None:
    def write(step: int) -> list[float]:
        return 2 * [as_given(3e-3 * factor(step)).item()]

    job = Job(lambda step: as_given(3e-3 * factor(step))).train(write=write)
    assert job.search is not None
    assert job.search.finished


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda step: [1e-3], r"gives \[0.001\] for step 0; it is asked for the learning rate that the loop writes"),
        (lambda step: 1e-3 * (10 - step), r"gives -0.001 for step 11"),
        (lambda step: None, "gives None for step 0"),
        (lambda step: "1e-3", "gives '1e-3' for step 0"),
        (lambda step: BASES[step] / 1, "and raised IndexError for step 2: tuple index out of range"),
        (
            itertools.count(1).__next__,
            "__next__ is asked for the rate of each step of the run, and raised TypeError for step 0",
        ),
        (lambda step: next(COUNTED), "gives other rates when it is asked for step 0 again"),
        (lambda step: math.nan, "gives nan for step 0"),
        (LambdaLR, "or a function of the step that tells what the loop writes, got the class LambdaLR"),
        (hdet.schedules.Cosine(1e-3, total_steps=STEPS), "got Cosine; give schedule=None"),
    ],
)
def test_what_foretells_no_rates_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Job(given)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (1.0, "adjust writes into the optimizer; hdet asks it for all steps beforehand"),
        (None, "adjust gives None for step 0"),  # as of a handler of events, which is called for what it does
    ],
)
def test_a_function_that_writes_the_rates_is_refused_and_leaves_them(returned: float | None, message: str) -> None:
    model = network()
    optimizer = adamw(model)

    def adjust(step: int) -> float | None:
        for group in optimizer.param_groups:
            group["lr"] = factor(step)
        return returned and returned * factor(step)

    with pytest.raises(ConfigError, match=message):
        hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, scheduler=adjust, quiet=True)
    assert tuple(group["lr"] for group in optimizer.param_groups) == BASES


def test_a_function_is_given_the_step_itself() -> None:
    with pytest.raises(ConfigError, match="a function is given the step"):
        Job(scheduler_every=5)
