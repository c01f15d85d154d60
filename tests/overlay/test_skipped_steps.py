"""Steps that a loss scaler skips, as a DeepSpeed engine's optimizer tells of them: only after the fact."""

from __future__ import annotations

import math
from collections.abc import Callable

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


def scaled(
    steps: int,
    skipping: tuple[int, ...],
    end: Callable[[hdet.Search], object] = lambda search: None,
    *,
    after: Callable[[int, hdet.Search], object] = lambda step, search: None,
    fused: bool = False,
) -> hdet.Search:
    """A loop over so many batches under a GradScaler that skips some steps; labels are noise, so means are better."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    with hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, window=4, quiet=True) as search:
        for step in range(steps):
            inputs, _ = batch(step)
            labels = torch.randint(3, (8,), generator=torch.Generator().manual_seed(step))
            scaler.scale(search.loss(loss_of(model, (inputs, labels)))).backward()  # type: ignore[no-untyped-call]
            if step in skipping:
                model[0].weight.grad[0, 0] = math.inf  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after(step, search)
        end(search)
    return search


@pytest.mark.parametrize("skipping", [(), (0,), (3, 17), (STEPS - 1,)])
def test_a_loop_whose_scaler_skipped_steps_ends_as_it_would_have(skipping: tuple[int, ...]) -> None:
    search = scaled(STEPS, skipping)
    assert search.engine.step_count == STEPS - len(skipping)
    assert search.finished
    assert search.history.windows[-1].tail


@pytest.mark.parametrize(("steps", "skipping"), [(STEPS - 1, ()), (STEPS - 8, (0, 1)), (STEPS, tuple(range(8)))])
def test_one_that_left_before_its_time_keeps_what_was_trained(steps: int, skipping: tuple[int, ...]) -> None:
    search = scaled(steps, skipping)
    assert search.finished
    assert search.history.windows[-1].stop == steps - len(skipping)
    assert search.history.windows[-1].tail == {}


def test_a_loop_without_the_block_says_that_it_is_over() -> None:
    told: list[bool] = []

    def end(search: hdet.Search) -> None:
        for only_if_over in (True, False):
            search.finish(only_if_over=only_if_over)
            told.append(search.finished)

    assert scaled(STEPS - 8, (0, 1), end).history.windows[-1].tail == {}
    assert told == [False, True], "it may be taken up again, or not"
    told.clear()
    assert scaled(STEPS, (3, 17), end).history.windows[-1].tail
    assert told == [True, True]


@pytest.mark.parametrize("fused", [False, True])
def test_skipped_steps_are_counted_however_the_optimizer_tells(fused: bool) -> None:
    """A fused one is stepped all the same, and leaves its weights alone."""
    search = scaled(STEPS, (3, 17), fused=fused)
    assert search.state_dict()["lost"] == 2
    assert search.history.windows[-1].tail


@pytest.mark.parametrize("at", [4, 17])
def test_a_skipped_step_is_counted_in_a_state_taken_right_after_it(at: int) -> None:
    """Until the next pass nobody knows that the one before led to no step."""
    states: list[int] = []
    scaled(STEPS, (at,), after=lambda step, search: states.append(search.state_dict()["lost"]))
    assert states == [0] * at + [1] * (STEPS - at)


def test_steps_that_were_made_are_none_that_were_skipped() -> None:
    """Whoever tells hdet after each step that passes before it led to none, as the callback for Lightning does."""
    search = scaled(STEPS - 1, (), after=lambda step, search: search.drop_passes())
    assert search.state_dict()["lost"] == 0
    assert search.history.windows[-1].tail == {}
