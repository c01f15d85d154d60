"""Rates of groups that stand at 0 for a while: frozen by their rate, as in gradual unfreezing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attach_parts import STEPS, adamw, batch, explicit, loss_of, network, probe
from torch import nn

import hdet
from hdet.controllers.state import NoState

WAKES = 20


class Creeping(hdet.controllers.Controller):
    """Moves by as much in each window that taught something, or in all."""

    by: float
    deaf: bool = False

    def start(self) -> NoState:
        return NoState()

    def step(
        self, state: NoState, estimate: hdet.controllers.Estimate, context: hdet.controllers.Context
    ) -> tuple[float, NoState]:
        return self.by if self.deaf or estimate.testable else 0.0, state


CREEPING = hdet.LearningRate(evidence=hdet.evidence.Line(), controller=Creeping(by=0.5))


def in_force(
    lambdas: list[Callable[[int], float]] | None, write: Callable[[int, Any], None] = lambda *_: None, **options: Any
) -> tuple[list[list[float]], hdet.Search]:
    """The rates of both groups at each step, with nothing to learn but what `options` say."""
    model = network()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambdas) if lambdas else None
    how = {"scheduler": scheduler, "total_steps": STEPS} if scheduler else {"schedule": None}
    options = {"exclude": ["weight_decay", "dropout"], "window": 5, "guard": None, "tail": None, **options}
    search = hdet.attach(model, optimizer, probe=probe(), quiet=True, **how, **options)
    seen: list[list[float]] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append([float(g["lr"]) for g in optimizer.param_groups]))
    for step in range(STEPS):
        write(step, optimizer)
        search.loss(loss_of(model, batch(step))).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    return seen, search


def late(step: int) -> float:
    return 0.0 if step < WAKES else 1.0


def always(step: int) -> float:
    return 1.0


@pytest.mark.parametrize("sleeps", [0, 1])
def test_what_is_learned_is_in_force_whichever_group_sleeps(sleeps: int) -> None:
    lambdas = [always, always]
    lambdas[sleeps] = late
    seen, _ = in_force(lambdas, knobs=[CREEPING], warmup_steps=0)
    given, other = [3e-3, 1e-3][1 - sleeps], [3e-3, 1e-3][sleeps]
    for step in range(5, STEPS):
        factor = torch.tensor(0.5 * (step // 5)).exp().item()
        assert seen[step][1 - sleeps] == pytest.approx(given * factor, rel=1e-6), step
        assert seen[step][sleeps] == pytest.approx(other * factor if step >= WAKES else 0.0, rel=1e-6), step


@pytest.mark.parametrize("tensor", [False, True])
def test_a_group_that_the_loop_puts_to_sleep_leaves_the_others_factor(tensor: bool) -> None:
    def write(step: int, optimizer: torch.optim.Optimizer) -> None:
        first = optimizer.param_groups[0]
        if step == 0 and tensor:
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(group["lr"])
        if step == 12:
            first["lr"] = torch.tensor(0.0) if tensor else 0.0

    seen, _ = in_force(None, write, knobs=[CREEPING])
    for step in (11, 12, 24, STEPS - 1):
        moves = min(step // 5, 3)  # none by a window in which the group that the factor is measured at slept
        assert seen[step][1] == pytest.approx(1e-3 * torch.tensor(0.5 * moves).exp().item(), rel=1e-5), step
        assert (seen[step][0] == 0.0) == (step >= 12)


def test_a_rate_that_was_0_all_window_long_is_not_moved() -> None:
    """Nothing that was in force can have been judged; what the first window tells of the weights is heard."""
    told: list[Any] = []

    class Listening(Creeping):
        def step(self, state: NoState, estimate: hdet.controllers.Estimate, context: Any) -> tuple[float, NoState]:
            told.append(estimate)
            return super().step(state, estimate, context)

    knob = hdet.LearningRate(groups=0, evidence=hdet.evidence.Line(), controller=Listening(by=0.5))
    seen, search = in_force([late, always], knobs=[knob], warmup_steps=0)
    moves = [record.moves[knob.label] for record in search.history.windows]
    assert moves == [0.0] * (WAKES // 5) + [0.5] * ((STEPS - WAKES) // 5)
    assert seen[WAKES][0] == 3e-3
    assert told[0].excess is not None
    assert not told[0].known


def test_of_rates_of_groups_one_that_sleeps_takes_part_in_what_they_have_in_common() -> None:
    """It was judged by those that trained, so that the ratios that were given stay."""
    _, search = in_force([late, always], rates="groups", warmup_steps=0)
    asleep = search.history.windows[: WAKES // 5]
    assert any(record.moves["learning_rate[0]"] for record in asleep)


def test_a_knob_that_can_leave_0_is_judged_there() -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.0), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    knob = hdet.Dropout(controller=Creeping(by=0.1, deaf=True))
    engine = hdet.recommended(model, optimizer, total_steps=STEPS, probe=probe(), knobs=[knob], quiet=True)
    explicit(engine, model, optimizer)
    assert engine.history.windows[0].moves["dropout"] == pytest.approx(0.1)
