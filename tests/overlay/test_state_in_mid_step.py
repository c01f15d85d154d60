"""The optimizer's state is asked for while it steps: what is saved is the loop's, and the step goes on as it was."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from grouped_runs import STEPS, attach, build, examples, train
from torch.nn import functional as F

import hdet

HELD = {"schedule": hdet.schedules.Constant(3e-3), "guard": None}


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("rates", ["together", "matrices"])
def test_a_step_whose_state_is_saved_in_its_midst_goes_on_at_what_was_learned(rates: str, tensor: bool) -> None:
    """By a hook of the loop's own; what is saved are the loop's values, and stays so."""
    model, _ = build(width=64)
    rate: Any = torch.tensor(3e-3) if tensor else 3e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
    search = attach(model, optimizer, rates=rates, schedule=None if tensor else HELD["schedule"], guard=None)
    saved: list[Any] = []
    stepped: list[list[float]] = []

    def rates_of(groups: list[Any]) -> list[float]:
        return [float(f"{float(group['lr']):.5g}") for group in groups]

    optimizer.register_step_pre_hook(lambda own, *_: saved.append(own.state_dict()["param_groups"]))
    optimizer.register_step_pre_hook(lambda own, *_: stepped.append(rates_of(own.param_groups)))
    for step in range(STEPS):
        bases = {float(f"{knob.base(step):.5g}") for knob in search.engine.knobs}
        train(model, optimizer, search, start=step, stop=step + 1)
        assert sorted(set(stepped[-1])) == pytest.approx(sorted(bases), rel=1e-4)
        assert tensor or len(stepped[-1]) == len(bases)
        assert rates_of(optimizer.param_groups) == [3e-3]
    assert [rates_of(groups) for groups in saved] == [[3e-3]] * STEPS
    assert max(stepped[-1]) > 4e-3


def test_after_a_step_that_raised_a_closure_that_saves_finds_the_loops_own_values() -> None:
    model, optimizer = build(width=64, foreach=True)
    search = attach(model, optimizer, **HELD)
    train(model, optimizer, search, stop=30)
    failing = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(model, optimizer, search, start=30, stop=31)
    failing.remove()
    found: list[list[float]] = []

    def closure() -> torch.Tensor:
        inputs, labels = examples(31)
        loss = search.loss(F.cross_entropy(model(inputs), labels))
        loss.backward()
        optimizer.state_dict()
        found.append([group["lr"] for group in optimizer.param_groups])
        return loss

    optimizer.step(closure)
    assert found == [[3e-3]]
    assert max(knob.base(31) for knob in search.engine.knobs) > 4e-3


def ask(chain: hdet.ChainedOptimizer, *_: Any) -> None:
    chain.state_dict()


@pytest.mark.parametrize("before", [True, False])
def test_a_chains_state_that_a_members_hook_asks_for_leaves_its_step_as_it_is(before: bool) -> None:
    """Rates that were learned are in force for both, and neither forgets its state."""
    ends = []
    for asked in (False, True):
        model, _ = build(width=64)
        first = torch.optim.AdamW([model[0].weight, model[2].weight], lr=3e-3, foreach=True)
        second = torch.optim.SGD([model[0].bias, model[2].bias], lr=3e-3, foreach=True)
        chain = hdet.ChainedOptimizer(first, second)
        search = attach(model, chain, rates="matrices", **HELD)
        if asked:
            register = first.register_step_pre_hook if before else first.register_step_post_hook
            register(partial(ask, chain))
        train(model, chain, search)
        assert int(first.state[model[0].weight]["step"]) == STEPS
        ends.append([parameter.tolist() for parameter in model.parameters()])
    assert ends[0] == ends[1]
