"""A model and an optimizer come back from a checkpoint, and a search does not: it warms up once more."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import explicit_loop
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import hdet
from hdet.schedules import Constant, LinearDecay, Schedule

STEPS, WINDOW, MADE = 40, 5, 7
RISING = LinearDecay(peak=0.01, total_steps=STEPS, warmup=0.5)


def batch(step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


PROBE = hdet.Probe(lambda model, x: (model(x) - 1.0).square().mean(1), [batch(100), batch(101)])


def loss(model: Any, step: int, index: int = 0) -> Tensor:
    found: Tensor = (model(batch(step)) - 1.0).square().mean()
    return found


def trained(make: Any) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer: Optimizer = make(model.parameters(), lr=0.01)
    for step in range(MADE):
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def engine(model: nn.Module, optimizer: Optimizer, schedule: Schedule = RISING) -> hdet.Engine:
    knobs = [hdet.LearningRate(schedule=schedule)]
    replicas = hdet.micro_batches(model, optimizer, n=1)
    return hdet.Engine(replicas, knobs, window=WINDOW, signal=PROBE, total_steps=STEPS)


@pytest.mark.parametrize("fused", [False, True])
def test_a_second_warm_up_is_warned_of_once(fused: bool) -> None:
    model, optimizer = trained(lambda parameters, lr: AdamW(parameters, lr=lr, fused=fused))
    with pytest.warns(UserWarning, match=f"had made {MADE} steps before .* learning_rate warms up once more") as told:
        explicit_loop.train(engine(model, optimizer), loss=loss)
    assert len(told) == 1


def test_so_it_is_under_attach() -> None:
    model, optimizer = trained(AdamW)
    search = hdet.attach(
        model, optimizer, probe=PROBE, schedule="own", total_steps=STEPS, window=WINDOW, micro_batches=1, quiet=True
    )

    def window() -> None:
        for step in range(WINDOW):
            search.loss(loss(model, step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(UserWarning, match="warms up once more"):
        window()


def under_way(made: int, rises: int, every: int = 1, resumed_after: int = 0, **options: Any) -> None:
    """`made` steps under a scheduler that rises for so many, then hdet joins in for a window."""

    def fresh() -> tuple[nn.Module, Optimizer, LambdaLR]:
        model = nn.Linear(4, 2)
        optimizer = AdamW(model.parameters(), lr=0.01)
        return model, optimizer, LambdaLR(optimizer, lambda at: min(1.0, (at + 1) / rises))

    def train(begin: int, end: int) -> None:
        for step in range(begin, end):
            search.loss(loss(model, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % every == 0:
                scheduler.step()

    model, optimizer, scheduler = fresh()
    search: Any = SimpleNamespace(loss=lambda found: found)
    train(0, made)
    options = {"scheduler_every": every, "window": WINDOW, "micro_batches": 1, "quiet": True, **options}

    def join() -> Any:
        return hdet.attach(model, optimizer, probe=PROBE, scheduler=scheduler, total_steps=STEPS, **options)

    search = join()
    train(made, made + resumed_after)
    if resumed_after:
        states = [copy.deepcopy(part.state_dict()) for part in (model, optimizer, scheduler, search)]
        model, optimizer, scheduler = fresh()
        search = join()
        for part, state in zip((model, optimizer, scheduler, search), states, strict=True):
            part.load_state_dict(state)
    train(made + resumed_after, made + WINDOW)


@pytest.mark.parametrize(("made", "every"), [(6, 1), (6, 3), (8, 3)])
def test_a_scheduler_that_is_in_its_warm_up_goes_on_with_it(made: int, every: int) -> None:
    under_way(made, 40 // every, every)


def test_so_it_does_after_a_resume_within_the_first_window() -> None:
    under_way(6, 40, resumed_after=2)


def test_held_below_a_line_it_warms_up_once_more() -> None:
    with pytest.warns(UserWarning, match="had made 6 steps before"):
        under_way(6, 2, warmup_steps=20)


def test_one_rate_of_several_is_enough() -> None:
    """The second group is held below a line, the first has its scheduler's own warm-up, which is under way."""
    model = nn.Linear(4, 2)
    optimizer = AdamW([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.01)
    shares = [lambda at: min(1.0, (at + 1) / 40), lambda at: min(1.0, (at + 1) / 20)]
    scheduler = LambdaLR(optimizer, shares)

    def train(steps: range) -> None:
        for step in steps:
            search.loss(loss(model, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    search: Any = SimpleNamespace(loss=lambda found: found)
    train(range(6))
    options: dict[str, Any] = {"rates": "groups", "warmup_steps": 30, "window": WINDOW, "micro_batches": 1}
    search = hdet.attach(model, optimizer, probe=PROBE, scheduler=scheduler, total_steps=STEPS, quiet=True, **options)
    with pytest.warns(UserWarning, match="had made 6 steps before"):
        train(range(6, 6 + WINDOW))


@pytest.mark.parametrize("schedule", [Constant(0.01), LinearDecay(peak=0.01, total_steps=STEPS, warmup=0.0)])
def test_without_a_warm_up_nothing_is_said(schedule: Schedule) -> None:
    explicit_loop.train(engine(*trained(AdamW), schedule), loss=loss)


def test_what_else_an_optimizer_keeps_is_left_alone() -> None:
    model, optimizer = trained(SGD)
    optimizer.state["global"] = 1  # type: ignore[index]
    explicit_loop.train(engine(model, optimizer), loss=loss)


def test_an_optimizer_that_does_not_count_says_nothing() -> None:
    explicit_loop.train(engine(*trained(SGD)), loss=loss)


def test_a_run_that_goes_on_with_its_search_is_not_warned() -> None:
    """Within the first window, too: its steps are the search's own."""
    model = nn.Linear(4, 2)
    first = engine(model, AdamW(model.parameters(), lr=0.01))
    explicit_loop.train(first, WINDOW - 2, loss=loss)
    model = nn.Linear(4, 2)
    second = engine(model, AdamW(model.parameters(), lr=0.01))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    explicit_loop.train(second, loss=loss)
