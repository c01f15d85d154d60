"""A user's scheduler, simulated on a copy: what cannot be foreseen is said, and nothing of the user's is copied."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from attach_parts import STEPS, adamw, batch, loss_of, network, probe
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    SequentialLR,
)

import hdet
from hdet.errors import ConfigError, StepError
from hdet.overlay.rates import Rates
from hdet.overlay.told_schedule import Course, Follower, Told


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


def attached(make: Callable[[torch.optim.Optimizer], Any], per_epoch: int | None = None, **options: Any) -> hdet.Search:
    """Four steps; `per_epoch` of them, where given, are one of the scheduler."""
    model = network()
    optimizer = adamw(model)
    scheduler = make(optimizer)
    options = {"warmup_steps": 0, "quiet": True, "window": 5, **options}
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, scheduler=scheduler, **options)
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


class HandsOver(LambdaLR):
    """Warms up, and leaves the rest to another scheduler, from which on it counts no steps of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer, after: Any) -> None:
        self.after: list[Any] = []
        super().__init__(optimizer, lambda step: min(1.0, (step + 1) / 3))
        self.after = [after]

    def step(self, epoch: int | None = None) -> None:
        if not self.after or self.last_epoch < 2:
            super().step()
        else:
            self.after[0].step()


@pytest.mark.parametrize("after", ["scheduler", "chain", "sequence", "another that does"])
def test_a_scheduler_that_hands_over_to_another_is_followed(after: str) -> None:
    def make(optimizer: torch.optim.Optimizer) -> HandsOver:
        last: Any = CosineAnnealingLR(optimizer, STEPS)
        if after == "chain":
            last = ChainedScheduler([last, CosineAnnealingLR(optimizer, 2 * STEPS)])
        if after == "sequence":
            last = SequentialLR(optimizer, [last, CosineAnnealingLR(optimizer, STEPS)], [5])
        return HandsOver(optimizer, last if after != "another that does" else HandsOver(optimizer, last))

    optimizer = adamw(network())
    alone = make(optimizer)
    rates = []
    for _ in range(11):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        alone.step()
    schedule = attached(make).engine.knobs[0].schedule
    assert [schedule(step) for step in (3, 4, 10)] == pytest.approx([rates[3], rates[4], rates[10]])
    assert len(set(rates)) > 6


def test_a_scheduler_that_cannot_be_copied_is_refused() -> None:
    counting = Counting()
    counting.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="LambdaLR cannot be copied, and so not be simulated ahead"):
        attached(lambda optimizer: LambdaLR(optimizer, counting))


def test_a_scheduler_of_ones_own_that_waits_for_a_metric_is_refused_and_is_as_it_was() -> None:
    """As a warm-up does that hands over to ReduceLROnPlateau, which asks for it after its first steps alone."""

    class Waiting(LambdaLR):
        def step(self, metric: Any = None) -> None:
            if self.last_epoch >= 2:
                float(metric)
            super().step()

    model = network()
    optimizer = adamw(model)
    scheduler = Waiting(optimizer, lambda step: 1 / (1 + step))
    held = scheduler.state_dict(), [dict(group) for group in optimizer.param_groups]
    with pytest.raises(ConfigError, match=r"Waiting cannot be simulated ahead: its step\(\) raised TypeError \(float"):
        hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, scheduler=scheduler, quiet=True)
    assert (scheduler.state_dict(), optimizer.param_groups) == held
    hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, schedule=None, quiet=True).detach()


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


@pytest.mark.parametrize("warm_up", [3, 8, 12, 20])
def test_a_scheduler_that_warms_up_for_too_few_steps_is_held_below_a_line(
    warm_up: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """It reaches its peak at step `warm_up`; the recipe wants 12 steps, 30 % of the run's."""

    def share(step: int) -> float:
        return min(step / warm_up, 1.0 - step / 100)

    options = {"warmup_steps": None, "quiet": False}
    schedule = attached(lambda optimizer: LambdaLR(optimizer, share), **options).engine.knobs[0].schedule
    peak, needed = max(share(step) for step in range(STEPS)), warm_up <= 8
    for step in range(4, STEPS):
        line = peak * (step + 1) / 12 if needed and step < 12 else 1.0
        assert schedule(step) == pytest.approx(3e-3 * min(share(step), line)), step
    assert schedule.nominal_peak() == pytest.approx(3e-3 * peak)
    assert ("by a warm-up of 12 steps" in capsys.readouterr().out) is needed


@pytest.mark.parametrize(("between", "each"), [(4, 1), (1, 2)])
def test_a_warm_up_is_counted_in_optimizer_steps(between: int, each: int) -> None:
    """As that of a scheduler stepped once in four, and of Accelerate's on two ranks. Steps 9 and 10 of 12 are late."""
    for reached, needed in ((8, True), (12, False)):
        shares = [min(1.0, step / reached) for step in range(0, STEPS, between) for _ in range(each)]
        course = Course([shares[0]], [[share] for share in shares], between, each)
        warmed = Told(course, 0, STEPS).with_warmup(12)
        assert (warmed(reached) < 1.0) is needed
        assert warmed(20) == 1.0


@pytest.mark.parametrize(("between", "each", "before"), [(1, 1, 6), (3, 1, 20), (1, 2, 3)])
def test_steps_before_are_optimizer_steps(between: int, each: int, before: int) -> None:
    """Of a scheduler that has made six: at the most, as it may be about to make the next one."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    follower = Follower(scheduler, optimizer, between)
    follower.first, follower.steps_each = 6, each
    assert follower.steps_before == before


def test_periodic_rates_that_drift_upwards_are_held() -> None:
    """Torch's cosine works out each rate from the one before, so that each period's peak is a little higher."""
    schedule = (
        attached(lambda optimizer: CosineAnnealingLR(optimizer, T_max=5), warmup_steps=12).engine.knobs[0].schedule
    )
    assert schedule(10) == pytest.approx(3e-3 * 11 / 12)


def test_a_training_that_is_under_way_is_not_warmed_up_again() -> None:
    model = network()
    optimizer = adamw(model)
    scheduler = LambdaLR(optimizer, lambda step: 1.0 - step / 100)
    optimizer.step()
    scheduler.step()
    options = {"probe": probe(), "total_steps": STEPS, "scheduler": scheduler, "quiet": True}
    search = hdet.attach(model, optimizer, **options)
    knob = search.engine.knobs[0]
    assert knob.schedule(0) == pytest.approx(0.99 * 3e-3)
    assert knob.spec.initial_shift == 0.0
    asked_for = hdet.attach(model, optimizer, warmup_steps=12, **options)
    assert asked_for.engine.knobs[0].schedule(0) == pytest.approx(0.99 * 3e-3 / 12)


def test_a_warm_up_of_hdets_moves_all_groups_and_leaves_what_the_scheduler_wrote() -> None:
    model = network()
    optimizer = adamw(model)
    scheduler = LambdaLR(optimizer, lambda step: 1.0 - step / 100)
    search = hdet.attach(
        model, optimizer, probe=probe(), total_steps=STEPS, scheduler=scheduler, window=STEPS, quiet=True
    )
    in_force: list[list[float]] = []
    optimizer.register_step_pre_hook(lambda *_: in_force.append([group["lr"] for group in optimizer.param_groups]))
    for step in range(20):
        train(model, optimizer, scheduler, search, step, step + 1)
        left = 1.0 - (step + 1) / 100
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([3e-3 * left, 1e-3 * left])
    shares = [min(1.0 - step / 100, (step + 1) / 12 if step < 12 else 1.0) for step in range(20)]
    assert in_force == [pytest.approx([3e-3 * share, 1e-3 * share]) for share in shares]


@pytest.mark.parametrize("again_with", [None, 9])
@pytest.mark.parametrize("stopped_at", [5, 25])
@pytest.mark.parametrize("warm_up", [3, 16])
def test_a_run_whose_scheduler_is_restored_first_goes_on_as_if_it_had_not_stopped(
    warm_up: int, stopped_at: int, again_with: int | None
) -> None:
    """What is foreseen is its rest and, beyond the run's end, rates below 0; peak and warm-up are the checkpoint's."""
    whole = begun(warm_up)
    search = attach(*whole)
    train(*whole, search, 0, stopped_at)
    saved = saved_at(*whole, search)
    random = torch.get_rng_state()
    train(*whole, search, stopped_at, STEPS)
    again = begun(warm_up, saved)
    resumed = attach(*again, warmup_steps=again_with)
    resumed.load_state_dict(saved[-1])
    torch.set_rng_state(random)
    train(*again, resumed, stopped_at, STEPS)
    assert resumed.engine.learned == search.engine.learned
    assert resumed.engine.learned["learning_rate"].start == search.engine.knobs[0].schedule.nominal_peak()
    for ours, theirs in zip(again[0].parameters(), whole[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_search_of_a_version_that_saw_to_no_warm_up_goes_on_without() -> None:
    whole = begun(3)
    search = attach(*whole, warmup_steps=0)
    train(*whole, search, 0, 5)
    saved = saved_at(*whole, search)
    (course,) = (course for course in courses_in(saved[-1]) if course["forecast"].numel())
    del course["warmup_steps"]
    again = begun(3)  # the scheduler is restored after the search
    resumed = attach(*again)
    assert resumed.engine.knobs[0].schedule(5) < 2e-3
    resumed.load_state_dict(saved[-1])
    for part, state in zip(again, saved[:-1], strict=True):
        part.load_state_dict(state)
    assert resumed.engine.knobs[0].schedule(5) == pytest.approx((1.0 - 5 / STEPS) * 3e-3)


def test_a_scheduler_that_goes_below_0_within_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learning_rate: its schedule reaches -0.00138\d*, outside the bounds"):
        attached(lambda made: LambdaLR(made, lambda step: 1.0 - 1.5 * step / STEPS), warmup_steps=0)


def test_a_scheduler_under_way_that_comes_below_0_is_refused_there() -> None:
    model = network()
    optimizer = adamw(model)
    scheduler = LambdaLR(optimizer, lambda step: 1.0 - step / 6)
    optimizer.step()
    scheduler.step()
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, scheduler=scheduler, quiet=True)
    train(model, optimizer, scheduler, search, 1, 6)
    with pytest.raises(StepError, match=r"LambdaLR has gone below 0 at step 6: .*-0.0005"):
        train(model, optimizer, scheduler, search, 6, 9)


def courses_in(state: Any) -> Iterator[dict[str, Any]]:
    if isinstance(state, dict):
        if "forecast" in state:
            yield state
        for value in state.values():
            yield from courses_in(value)


Made = tuple[torch.nn.Module, torch.optim.Optimizer, LambdaLR]


def begun(warm_up: int, saved: Sequence[Any] = ()) -> Made:
    model = network()
    optimizer = adamw(model)
    made = model, optimizer, LambdaLR(optimizer, lambda step: min((step + 1) / warm_up, 1.0 - step / STEPS))
    for part, state in zip(made, saved, strict=False):
        part.load_state_dict(state)
    return made


def attach(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: LambdaLR, **options: Any
) -> hdet.Search:
    options = {"probe": probe(), "total_steps": STEPS, "window": 5, "quiet": True, **options}
    return hdet.attach(model, optimizer, scheduler=scheduler, **options)


def saved_at(*parts: Any) -> list[Any]:
    return copy.deepcopy([part.state_dict() for part in parts])


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LambdaLR,
    search: hdet.Search,
    start: int,
    stop: int,
) -> None:
    for step in range(start, stop):
        search.loss(loss_of(model, batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
