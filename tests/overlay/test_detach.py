"""A search that leaves its loop: at any step, in the midst of a window, of an optimizer's step or of its closure."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from attach_parts import STEPS, adamw, batch, loop, loss_of, network, probe

import hdet
from hdet.errors import StepError


@pytest.mark.parametrize("stop", [0, 1, 7, 40])
def test_detached_at_any_step_nothing_is_left(stop: int) -> None:
    model = network()
    optimizer = adamw(model)
    before = set(vars(model)), set(vars(optimizer)), optimizer.state_dict()["param_groups"]
    hooks = len(model._forward_pre_hooks), len(model._forward_hooks)
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, quiet=True, window=5)
    loop(model, optimizer, search=search, stop=stop)
    model(batch(stop)[0])  # a pass under way
    search.detach()
    search.detach()
    assert (set(vars(model)), set(vars(optimizer)), optimizer.state_dict()["param_groups"]) == before
    assert (len(model._forward_pre_hooks), len(model._forward_hooks)) == hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert model[2].p == 0.2
    steps = search.engine.step_count
    loop(model, optimizer, stop=2)
    assert search.engine.step_count == steps


def test_as_a_context_manager_it_closes_the_window_under_way_and_detaches() -> None:
    model = network()
    optimizer = adamw(model)
    seen: list[hdet.history.WindowRecord] = []
    with hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, quiet=True, window=5) as search:
        search.on_window(seen.append)
        loop(model, optimizer, search=search, stop=13)
    assert [record.stop for record in seen] == [5, 10, 13]
    assert not model._forward_pre_hooks
    assert search.finished


def test_detached_in_mid_window_the_window_is_given_up() -> None:
    model = network()
    optimizer = adamw(model)
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, window=5, quiet=True)
    loop(model, optimizer, search=search, stop=7)
    search.detach()
    assert [record.stop for record in search.history] == [5]
    assert [group["lr"] for group in optimizer.param_groups] == [3e-3, 1e-3]


def test_detached_as_a_window_closes_it_leaves_hooks_of_others_alone() -> None:
    """Within the optimizer's step, whose hooks torch is going through."""
    model = network()
    optimizer = adamw(model)
    stepped: list[int] = []
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, window=5, quiet=True)
    optimizer.register_step_post_hook(lambda *_: stepped.append(len(stepped)))
    search.on_window(lambda record: search.detach())
    loop(model, optimizer, search=search, stop=8)
    assert len(stepped) == 8
    assert (search.attached, search.engine.step_count) == (False, 5)
    assert [group["lr"] for group in optimizer.param_groups] == [3e-3, 1e-3]
    hooks = (model._forward_pre_hooks, model._forward_hooks, optimizer._optimizer_step_pre_hooks)
    assert not any(hooks)
    assert len(optimizer._optimizer_step_post_hooks) == 1


def test_detached_within_a_closure_the_step_is_the_users_own() -> None:
    model = network()
    optimizer = adamw(model)
    given = [group["lr"] for group in optimizer.param_groups]
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, window=5, quiet=True)

    def closure(step: int) -> torch.Tensor:
        optimizer.zero_grad()
        if step == 3:
            search.detach()
        loss = search.loss(loss_of(model, batch(step)))
        loss.backward()
        return loss

    for step in range(6):
        optimizer.step(partial(closure, step))
        assert [group["lr"] for group in optimizer.param_groups] == given
    assert (search.attached, search.engine.step_count) == (False, 3)
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("fails", [False, True])
def test_detached_within_a_training_pass_the_pass_is_the_users_own(fails: bool) -> None:
    model = network()
    optimizer = adamw(model)
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, window=2, quiet=True, exclude=["dropout"])
    search.on_window(lambda record: search.detach())

    def run() -> torch.Tensor:
        loss = loss_of(model, batch(0))
        search.loss(loss).backward()
        optimizer.step()
        if fails and not search.attached:
            raise MemoryError("of the loop's own")
        return loss

    search.training_pass(run)
    with pytest.raises(MemoryError, match="of the loop's own") if fails else nullcontext():
        search.training_pass(run)
    assert not search.attached
    assert [group["lr"] for group in optimizer.param_groups] == [3e-3, 1e-3]
    model(batch(0)[0])
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("step", [0, 4, 9])
@pytest.mark.parametrize("rates", ["auto", "matrices"])
def test_detached_by_the_probes_loss_it_is_refused_and_nothing_stays_in_force(rates: str, step: int) -> None:
    """In the first step, where losses are compared, as a window closes, and as a run that seems lost is ended."""
    model = network()
    optimizer = adamw(model)
    before = optimizer.state_dict()["param_groups"]
    made = 0

    def loss(model: torch.nn.Module, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if made == step:
            search.detach()
        return loss_of(model, given)

    def run() -> None:
        nonlocal made
        for made in range(9):
            search.loss(loss_of(model, batch(made)) * (1.0 if made < 5 else 100.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        made = 9
        search.finish()

    own = hdet.Probe(loss, [batch(-1, part) for part in range(8)])
    search = hdet.attach(model, optimizer, probe=own, total_steps=STEPS, window=5, rates=rates, quiet=True)
    with pytest.raises(StepError, match=r"detach\(\) was called while hdet measures"):
        run()
    search.detach()
    assert optimizer.state_dict()["param_groups"] == before
    assert model[2].p == 0.2


def test_where_a_group_is_gone_in_mid_pass_the_search_leaves_the_model_all_the_same() -> None:
    model = network()
    optimizer = adamw(model)
    before = set(vars(model))

    def run() -> None:
        with hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, quiet=True, window=5) as search:
            loop(model, optimizer, search=search, stop=7)
            loss = loss_of(model, batch(7))
            optimizer.param_groups.pop()
            search.loss(loss).backward()

    with pytest.raises(StepError, match="was taken out of the optimizer in the middle of a pass") as raised:
        run()
    assert raised.value.__context__ is None
    assert set(vars(model)) == before
    assert not model._forward_pre_hooks
    assert model[2].p == 0.2


LEFT = "hdet left off at step 8 of 40, in mid-schedule; if training ends"


@pytest.mark.parametrize(("made", "told"), [(0, False), (8, True), (37, False), (40, False)])
def test_it_is_said_where_a_run_is_left_in_mid_schedule(
    made: int, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = network()
    optimizer = adamw(model)
    with hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, window=5) as search:
        capsys.readouterr()
        loop(model, optimizer, search=search, stop=made)
    assert (LEFT in capsys.readouterr().out) is told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"schedule": None}, False),
        ({"schedule": hdet.schedules.Constant(1e-3)}, False),
        ({"schedule": hdet.schedules.Replay([1.9e-3] * 20 + [1e-3] * 20)}, False),
        ({"schedule": hdet.schedules.Replay([2.1e-3] * 20 + [1e-3] * 20)}, True),
        ({"exclude": ["learning_rate"]}, False),
    ],
)
def test_it_is_said_where_the_rate_was_to_come_down(
    options: dict[str, Any], told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = network()
    optimizer = adamw(model)
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, warmup_steps=0, **options)
    loop(model, optimizer, search=search, stop=8)
    search.detach()
    search.detach()
    assert capsys.readouterr().out.count(LEFT) == told


@pytest.mark.parametrize("left", ["by an exception", "for a second search"])
def test_where_no_loop_ends_it_is_not_said(left: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = network()
    optimizer = adamw(model)
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS)
    loop(model, optimizer, search=search, stop=8)
    if left == "by an exception":
        with pytest.raises(KeyboardInterrupt), search:
            raise KeyboardInterrupt
    else:
        hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS)
    assert not search.attached
    assert LEFT not in capsys.readouterr().out


def test_a_search_whose_last_line_cannot_be_printed_is_detached(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*words: object) -> None:
        raise BrokenPipeError

    model = network()
    optimizer = adamw(model)
    undone: list[str] = []
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS)
    search.undo_when_detached(lambda: undone.append("all"))
    loop(model, optimizer, search=search, stop=8)
    monkeypatch.setattr("builtins.print", broken)
    with pytest.raises(BrokenPipeError):
        search.detach()
    assert (search.attached, undone) == (False, ["all"])
