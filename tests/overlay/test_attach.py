"""`hdet.attach`: a loop that stays as it is, bit for bit the loop without hdet, or the loop written for the engine."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attach_parts import STEPS, adamw, batch, explicit, loop, loss_of, network, probe
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler, OneCycleLR, SequentialLR

import hdet
from hdet.controllers import Hold
from hdet.errors import StepError
from hdet.replicas import tensors
from hdet.schedules import Replay
from hdet.spreads import TwoLevel

HELD = [
    hdet.LearningRate(controller=Hold()),
    hdet.WeightDecay(controller=Hold()),
    hdet.Dropout(controller=Hold(), spread=TwoLevel(0.0)),
]
"""Measured as ever and moved nowhere."""


def seeded() -> None:
    torch.manual_seed(7)


def states(model: nn.Module, optimizer: Any, scheduler: Any = None) -> list[Any]:
    return [model.state_dict(), optimizer.state_dict(), scheduler.state_dict() if scheduler is not None else {}]


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, STEPS),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, [3e-3, 1e-3], total_steps=STEPS + 1),
    "warm-up from 0": lambda optimizer: LambdaLR(optimizer, lambda step: min(step / 10, 1.0)),
    "sequential": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, 1.0, 10), CosineAnnealingLR(optimizer, 30)], [10]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("parts", [1, 4])
def test_held_it_is_the_loop_without_it_bit_for_bit(name: str, parts: int, assert_same: Any) -> None:
    found = []
    for attached in (False, True):
        seeded()
        model = network()
        optimizer = adamw(model)
        scheduler = SCHEDULERS[name](optimizer)
        search = None
        if attached:
            search = hdet.attach(
                model,
                optimizer,
                probe=probe(),
                total_steps=STEPS,
                scheduler=scheduler,
                knobs=HELD,
                tail=None,
                quiet=True,
            )
        loop(model, optimizer, scheduler, search, parts=lambda step: parts)
        found.append(copy.deepcopy(states(model, optimizer, scheduler)))
        if search is not None:
            assert search.finished
            assert all(record.estimates["learning_rate"]["t"] is not None for record in search.history)
    assert_same(*found)


def test_hdets_dropouts_beside_torchs_are_held_at_their_rate_bit_for_bit(assert_same: Any) -> None:
    """One whose float32 scales otherwise than its float does."""
    found = []
    for attached in (False, True):
        seeded()
        model = network()
        model[2].p = 0.6
        model.append(hdet.nn.Dropout(0.6))
        optimizer = adamw(model)
        search = None
        if attached:
            search = hdet.attach(
                model, optimizer, probe=probe(), total_steps=STEPS, schedule=None, knobs=HELD, tail=None, quiet=True
            )
        loop(model, optimizer, None, search)
        assert model[2].p == model[4].p == 0.6
        found.append(copy.deepcopy(states(model, optimizer)))
    assert_same(*found)


def told(history: hdet.History) -> list[dict[str, Any]]:
    records = [dict(vars(record)) for record in history]
    for record in records:
        del record["seconds"], record["closing"]
    return records


def decided(history: hdet.History) -> list[dict[str, Any]]:
    """Without the slopes, which are those of the gradients as the loop divided them."""
    records = told(history)
    for record in records:
        record["estimates"] = {name: estimate["t"] for name, estimate in record["estimates"].items()}
    return records


def plain_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)


@pytest.mark.parametrize("parts", [1, 4])
def test_the_recipe_is_the_explicit_loops_bit_for_bit(parts: int, assert_same: Any) -> None:
    options = {"total_steps": STEPS, "probe": probe(), "quiet": True, "micro_batches": parts, "window": 5}
    seeded()
    model = network()
    optimizer = plain_adamw(model)
    engine = hdet.recommended(model, optimizer, **options)  # type: ignore[arg-type]
    explicit(engine, model, optimizer)

    seeded()
    other = network()
    own = plain_adamw(other)
    search = hdet.attach(other, own, rates="together", **options)  # type: ignore[arg-type]
    loop(other, own, search=search, parts=lambda step: parts)
    assert_same(model.state_dict(), other.state_dict())
    assert_same(optimizer.state_dict()["state"], own.state_dict()["state"])
    assert decided(engine.history) == decided(search.history)
    assert engine.knobs[0].shift != 0.0
    assert any(record.estimates["dropout"]["stderr"] for record in search.history)
    assert own.param_groups[0]["lr"] == 3e-3
    assert other[2].p == 0.2  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["cosine", "warm-up from 0"])
def test_beside_a_scheduler_it_is_the_engine_with_that_schedule(name: str, assert_same: Any) -> None:
    """What a scheduler will write is known from a simulated copy."""
    model = network()
    optimizer = plain_adamw(model)
    scheduler = SCHEDULERS[name](optimizer)
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()

    seeded()
    model = network()
    optimizer = plain_adamw(model)
    engine = hdet.recommended(
        model, optimizer, total_steps=STEPS, probe=probe(), quiet=True, window=5, schedule=Replay(tuple(rates))
    )
    explicit(engine, model, optimizer)

    seeded()
    other = network()
    own = plain_adamw(other)
    scheduler = SCHEDULERS[name](own)
    given: dict[str, Any] = {"rates": "together", "scheduler": scheduler, "micro_batches": 1}
    search = hdet.attach(other, own, total_steps=STEPS, probe=probe(), quiet=True, window=5, **given)
    loop(other, own, scheduler, search)
    assert told(engine.history) == told(search.history)
    assert_same(model.state_dict(), other.state_dict())
    assert engine.knobs[0].shift != 0.0


def test_what_the_user_set_is_what_the_user_finds(assert_same: Any) -> None:
    model = network()
    optimizer = adamw(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    inside: list[list[float]] = []
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, quiet=True, window=5)
    step = type(optimizer).step

    def observed(*arguments: Any, **keywords: Any) -> Any:
        inside.append([group["lr"] for group in optimizer.param_groups])

    handle = optimizer.register_step_pre_hook(observed)
    assert step is type(optimizer).step
    for number in range(STEPS):
        loop(model, optimizer, search=search, start=number, stop=number + 1)
        assert [group["lr"] for group in optimizer.param_groups] == rates
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        assert model[2].p == 0.2
    handle.remove()
    assert len({row[0] for row in inside}) > 10
    assert all(row[0] == pytest.approx(3 * row[1]) for row in inside)


@pytest.mark.parametrize("of_tensors", [False, True])
def test_two_knobs_of_one_entry_leave_each_other_alone(of_tensors: bool) -> None:
    """Adam's betas are one tuple: each knob puts back its own element of it, and writes no other."""
    model = network()
    set_to = tuple(map(torch.tensor, (0.9, 0.999))) if of_tensors else (0.9, 0.999)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=set_to, foreach=False)
    knobs = [hdet.Beta1(initial_shift=0.3, controller=Hold()), hdet.Beta2(initial_shift=-0.3, controller=Hold())]
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, quiet=True, window=5, knobs=knobs)
    inside: list[tuple[float, ...]] = []
    optimizer.register_step_pre_hook(
        lambda *_: inside.append(tuple(float(beta) for beta in optimizer.param_groups[0]["betas"]))
    )
    for number in range(12):
        loop(model, optimizer, search=search, start=number, stop=number + 1)
        assert optimizer.param_groups[0]["betas"] == set_to
    logit = hdet.spaces.Logit()
    wanted = (logit.apply(0.9, 0.3), logit.apply(0.999, -0.3))
    assert inside == [pytest.approx(wanted)] * 12
    assert all(one is held for one, held in zip(set_to, optimizer.param_groups[0]["betas"], strict=True))


def restless(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, hdet.Search]:
    """A search under a rate at which a step undoes the last one, so that any mean is better than the last weights."""
    seeded()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=4.0)
    tail = hdet.TailAverage(starts=(0.4,), significance=0.0)
    given = {"probe": probe(), "total_steps": STEPS, "schedule": None, "window": 5, "guard": None, "tail": tail}
    return model, optimizer, hdet.attach(model, optimizer, knobs=HELD[:1], exclude=["dropout"], **given, **options)


def test_it_says_which_weights_it_ended_with(capsys: pytest.CaptureFixture[str]) -> None:
    """Those are in the model when the last step returns."""
    model, optimizer, search = restless()
    loop(model, optimizer, search=search, stop=STEPS - 1)
    assert "end: averaged weights, where the probe finds them better" in capsys.readouterr().out
    loop(model, optimizer, search=search, start=STEPS - 1)
    record = search.history.windows[-1]
    assert record.tail["difference"] < 0.0
    assert capsys.readouterr().out == f"hdet {record.ending}\n"
    *_, quiet = restless(quiet=True)
    loop(quiet.model, quiet.optimizer, search=quiet)
    assert quiet.history.windows[-1].tail == record.tail
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("stop", [STEPS - 2, STEPS - 5])
def test_a_search_that_is_left_before_its_end_keeps_what_was_trained(stop: int) -> None:
    model, optimizer, search = restless(quiet=True)
    with search:
        loop(model, optimizer, search=search, stop=stop)
        trained = tensors.clones(tensors.parameters(model))
    assert all(map(torch.equal, tensors.parameters(model), trained))
    assert search.history.windows[-1].tail == {}


def closed_pass(model: nn.Module, optimizer: torch.optim.Optimizer, search: hdet.Search, step: int) -> Tensor:
    optimizer.zero_grad()
    loss = search.loss(loss_of(model, batch(step)))
    loss.backward()
    return loss


@pytest.mark.parametrize("by_name", [True, False])
def test_a_closure_runs_its_pass_inside_the_step(by_name: bool, assert_same: Any) -> None:
    found = []
    for closed in (False, True):
        seeded()
        model = network()
        optimizer = plain_adamw(model)
        search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, quiet=True, window=5, micro_batches=1)
        if not closed:
            loop(model, optimizer, search=search)
        for step in range(STEPS if closed else 0):
            closure = partial(closed_pass, model, optimizer, search, step)

            given = optimizer.step(closure=closure) if by_name else optimizer.step(closure)  # type: ignore[arg-type]
            assert isinstance(given, Tensor)
        found.append((model.state_dict(), told(search.history)))
    assert_same(*found)


def in_parts(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    """What a trainer's step may do: the root module itself is never called."""
    hidden = given[0]
    for part in model.children():
        hidden = part(hidden)
    return F.cross_entropy(hidden, given[1])


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_training_pass_is_one_pass_however_often_the_model_is_called(calls: int) -> None:
    """A model that is never called is not seen without."""
    found = []
    for told_so in (True, False):
        seeded()
        model = network()
        optimizer = plain_adamw(model)
        search = hdet.attach(
            model,
            optimizer,
            probe=probe(),
            total_steps=STEPS,
            quiet=True,
            window=5,
            micro_batches=2,
            knobs=[hdet.Dropout()],
        )

        def twice(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
            return (loss_of(model, given) + loss_of(model, given)) / 2

        compute = {0: in_parts, 1: loss_of, 2: twice}[calls]
        for step in range(STEPS):
            for part in range(2):
                run = partial(compute, model, batch(step, part))
                loss = search.training_pass(run) if told_so else search.loss(run())
                (loss / 2).backward()
            if calls == 0 and not told_so:
                with pytest.raises(StepError, match=r"no training pass.*exclude=\['dropout'\]"):
                    optimizer.step()
                return
            optimizer.step()
            optimizer.zero_grad()
        found.append(decided(search.history))
        assert search.finished
        if told_so:
            assert any(record.estimates["dropout"]["stderr"] for record in search.history)
    assert found[0] == found[1]


def test_without_forward_knobs_a_loop_in_eval_mode_is_explored() -> None:
    """The case docs/attach.md tells of."""
    seeded()
    model = network()
    optimizer = plain_adamw(model)
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, quiet=True, exclude=["dropout"])
    model.eval()
    for step in range(STEPS):
        search.loss(loss_of(model, batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert search.finished
    assert any(record.estimates["learning_rate[others]"] for record in search.history)


def test_the_gradient_is_taken_before_it_is_clipped() -> None:
    found: list[Tensor] = []
    for clips in (False, True):
        seeded()
        model = network()
        optimizer = plain_adamw(model)
        search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, quiet=True, window=5, micro_batches=2)
        (contrast,) = (one for one in search.engine.cycle.collectors if hasattr(one, "seen"))

        def look(*_: Any, contrast: Any = contrast) -> None:
            found.append(contrast.seen[0].clone())

        optimizer.register_step_pre_hook(look)
        for part in range(2):
            search.loss(loss_of(model, batch(0, part))).backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    assert torch.equal(*found)


def test_a_second_backward_of_a_pass_leaves_the_step_out() -> None:
    model = network()
    optimizer = plain_adamw(model)
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, quiet=True, window=20, micro_batches=1)
    for step in range(20):
        loss = search.loss(loss_of(model, batch(step)))
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.warns(match="most steps of a window taught nothing") if step == 19 else nullcontext():
            optimizer.step()
        optimizer.zero_grad()
    [record] = search.history
    assert record.estimates["dropout"]["stderr"] == float("inf")
    assert record.estimates["learning_rate[others]"]["stderr"] > 0


def test_passes_that_led_to_no_step_are_dropped() -> None:
    """A GradScaler that skips tells no hook, and some loops zero gradients after the next forward."""
    model = network()
    optimizer = plain_adamw(model)
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, quiet=True, window=5, micro_batches=2)
    for part in range(2):
        search.loss(loss_of(model, batch(0, part)) * float("inf")).backward()
    search.drop_passes()
    for step in range(5):
        for part in range(2):
            loss = search.loss(loss_of(model, batch(step, part)))
            if part == 0:
                optimizer.zero_grad()
            loss.backward()
        optimizer.step()
    assert all(math.isfinite(loss) for loss in search.history.windows[0].losses if loss is not None)
    assert None not in search.history.windows[0].losses


class Saved:
    """A run saved by its parts, each in the way of its own."""

    def __init__(self, scheduled: bool) -> None:
        self.model = network()
        self.optimizer = plain_adamw(self.model)
        self.scheduler = SCHEDULERS["cosine"](self.optimizer) if scheduled else None
        self.parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        if self.scheduler is not None:
            self.parts["scheduler"] = self.scheduler

    def attach(self) -> None:
        self.search = hdet.attach(
            self.model,
            self.optimizer,
            probe=probe(),
            total_steps=STEPS,
            scheduler=self.scheduler,
            quiet=True,
            window=5,
            micro_batches=1,
        )
        self.parts["search"] = self.search

    def train(self, start: int, stop: int, thawed_from: int = 0) -> None:
        for step in range(start, stop):
            self.model[0].requires_grad_(step >= thawed_from)
            torch.manual_seed(step)
            loop(self.model, self.optimizer, self.scheduler, self.search, start=step, stop=step + 1)


ORDERS = [
    ("model", "optimizer", "scheduler", "attach", "search"),
    ("attach", "search", "model", "optimizer", "scheduler"),
    ("attach", "model", "search", "scheduler", "optimizer"),
    ("attach", "train", "search", "scheduler", "optimizer", "model"),
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("at", [10, 13])
def test_restored_in_any_order_it_is_the_same_run(
    order: tuple[str, ...], scheduled: bool, at: int, assert_same: Any
) -> None:
    straight = Saved(scheduled)
    straight.attach()
    straight.train(0, at)
    state = copy.deepcopy({name: part.state_dict() for name, part in straight.parts.items()})
    straight.train(at, STEPS)

    resumed = Saved(scheduled)
    for part in order:
        if part == "attach":
            resumed.attach()
        elif part == "train":
            resumed.train(0, 2)
        elif part in state:
            resumed.parts[part].load_state_dict(copy.deepcopy(state[part]))
    resumed.train(at, STEPS)
    assert_same(straight.model.state_dict(), resumed.model.state_dict())
    assert_same(straight.optimizer.state_dict(), resumed.optimizer.state_dict())
    assert told(straight.search.history)[-3:] == told(resumed.search.history)[-3:]
    assert straight.search.shifts == resumed.search.shifts


@pytest.mark.parametrize("at", [10, 13])
def test_a_resume_may_freeze_only_after_it_has_loaded(at: int, assert_same: Any) -> None:
    """Where the loop itself does, as by its step: what was kept of gradients is of those trained then."""

    straight, resumed = Saved(scheduled=False), Saved(scheduled=False)
    straight.model[0].requires_grad_(False)
    for run in (straight, resumed):
        run.attach()
    straight.train(0, at, thawed_from=26)
    for name, part in resumed.parts.items():
        part.load_state_dict(copy.deepcopy(straight.parts[name].state_dict()))
    assert all(parameter.requires_grad for parameter in resumed.model.parameters())
    for run in (straight, resumed):
        run.train(at, 24, thawed_from=26)
    assert_same(straight.model.state_dict(), resumed.model.state_dict())
    assert_same(straight.search.state_dict(), resumed.search.state_dict())


def test_a_search_is_printed_with_what_was_learned_of_what() -> None:
    model = network()
    optimizer = adamw(model)
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, window=5, quiet=True)
    assert repr(search).startswith(f"<Search at step 0 of {STEPS}: learning_rate, weight_decay")
    loop(model, optimizer, search=search)
    learned = "; ".join(f"{name} {one}" for name, one in search.shifts.items())
    assert repr(search) == f"<Search at step {STEPS} of {STEPS}: {learned}>"
    search.detach()
    assert f"of {STEPS}, detached: " in repr(search)


def rates_inside(optimizer: torch.optim.Optimizer) -> list[list[float]]:
    """What the groups hold whenever the optimizer steps, from now on."""
    seen: list[list[float]] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append([group["lr"] for group in optimizer.param_groups]))
    return seen


def test_rates_of_groups_share_a_slope_and_are_compared_by_their_steps() -> None:
    model = network()
    optimizer = adamw(model)
    search = hdet.attach(
        model, optimizer, probe=probe(), total_steps=STEPS, rates="groups", window=5, quiet=True, exclude=["dropout"]
    )
    loop(model, optimizer, search=search)
    assert {"learning_rate[0]", "learning_rate[1]", "weight_decay"} == set(search.shifts)
    assert [search.shifts[f"learning_rate[{group}]"].start for group in (0, 1)] == [3e-3, 1e-3]
    told = [[record.estimates[f"learning_rate[{group}]"] for group in (0, 1)] for record in search.history.windows]
    assert all(one["slope"] == other["slope"] for one, other in told)  # of what they have in common
    one, other = (own["step_ratio"] for own in told[0])
    assert one * other == pytest.approx(1.0)  # how far each goes, over the geometric mean of both
    assert abs(math.log(one)) > 0.1


def test_whatever_is_written_is_followed_where_nothing_is_foreseen() -> None:
    """Each group's own value, moved by the one factor; and nothing is looked ahead at."""
    model = network()
    optimizer = adamw(model)
    search = hdet.attach(model, optimizer, probe=probe(), schedule=None, window=5, quiet=True)
    inside = rates_inside(optimizer)
    knob = search.engine.knobs[0]
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 + step % 7)
        optimizer.param_groups[1]["lr"] = 5e-4
        factor = math.exp(knob.shift)
        loop(model, optimizer, search=search, start=step, stop=step + 1)
        assert inside[-1] == pytest.approx([1e-3 * (1 + step % 7) * factor, 5e-4 * factor])
    assert knob.shift != 0.0
    assert not any(record.estimates["learning_rate"]["offset"] for record in search.history)
    assert search.engine.total_steps is None


def test_a_warm_up_whose_end_nobody_told_is_not_raised() -> None:
    """Small steps look too small there only because the schedule is low."""
    model = network()
    optimizer = plain_adamw(model)
    search = hdet.attach(model, optimizer, probe=probe(), schedule=None, window=5, quiet=True)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, (step + 1) / 21)
        loop(model, optimizer, search=search, start=step, stop=step + 1)
    moves = [record.moves["learning_rate"] for record in search.history]
    assert max(moves[:4]) == 0.0
    assert max(moves[4:]) > 0.0


@pytest.mark.parametrize("swapped", [False, True])
def test_a_dropout_that_is_replaced_is_said_once(swapped: bool) -> None:
    model = network()
    if swapped:
        hdet.nn.swap(model)
    optimizer = adamw(model)
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, window=5, quiet=True)
    loop(model, optimizer, search=search, stop=7)
    model[2] = torch.nn.Dropout(0.5)
    with pytest.warns(UserWarning, match="1 of 1 places that dropout is written to are no part of the model") as said:
        loop(model, optimizer, search=search, start=7, stop=20)
    assert len(said) == 1
    assert model[2].p == 0.5


def layers_in_turns() -> tuple[nn.Module, torch.optim.Optimizer, hdet.Search]:
    model = network()
    optimizer = adamw(model)
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=10 * STEPS, window=5, quiet=True)
    model.register_forward_pre_hook(lambda *_: model[0].requires_grad_(search.engine.step_count // 4 % 2 == 0) and None)
    return model, optimizer, search


def test_layers_that_take_turns_faster_than_a_record_fills_are_said_once() -> None:
    model, optimizer, search = layers_in_turns()
    with pytest.warns(UserWarning, match="frozen or thawed in 5 windows on end") as said:
        loop(model, optimizer, search=search, stop=2 * STEPS)
    assert len(said) == 1
    assert search.shifts["dropout"].factor == 1.0


def test_a_resumed_run_says_so_when_the_whole_one_does() -> None:
    for stop in (13, 15):
        model, optimizer, search = layers_in_turns()
        loop(model, optimizer, search=search, stop=stop)
        state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), search.state_dict()))
        model, optimizer, search = layers_in_turns()
        for part, own in zip((model, optimizer, search), state, strict=True):
            part.load_state_dict(own)
        with pytest.warns(UserWarning, match="frozen or thawed in 5 windows on end"):
            loop(model, optimizer, search=search, start=stop, stop=25)


def test_a_step_without_passes_advises_what_is_not_refused() -> None:
    """A knob of the user's own is none that `exclude=` knows: it is to be left out of `knobs=`."""
    model = network()
    model.weight = 1.0  # type: ignore[assignment]
    optimizer = plain_adamw(model)
    own = hdet.Scalar("weight", path="weight", bounds=(0.1, 10))
    hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, quiet=True, knobs=[own])
    model.eval()
    loss_of(model, batch(0)).backward()
    with pytest.raises(StepError, match=r"judged by passes: exclude=\['dropout'\] and no weight in knobs="):
        optimizer.step()


def test_what_the_model_returned_is_saved_without_a_warning(tmp_path: Path, recwarn: Any) -> None:
    """A recurrent state, say, that is carried on and saved."""
    model = network()
    hdet.attach(model, plain_adamw(model), probe=probe(), total_steps=STEPS, quiet=True)
    torch.save(model(batch(0)[0]), tmp_path / "carried.pt")
    assert not [str(one.message) for one in recwarn if "hook" in str(one.message)]


def test_the_part_of_a_loss_that_is_told_counts_in_place_of_what_the_model_returned() -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def forward(self, given: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
            main = loss_of(self.layers, given)
            return {"loss": main + 100.0, "main": main}

    model = Summed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    held_out = hdet.Probe(lambda model, given: model(given)["main"], [batch(-1, part) for part in range(8)])
    search = hdet.attach(model, optimizer, probe=held_out, total_steps=20, window=5, quiet=True)
    for step in range(5):
        found = model(batch(step))
        search.loss(found["main"])
        found["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert max(search.history.windows[0].losses) < 10.0
