"""Loops that call forward, backward and step in an order or a place of their own, or fail in between."""

from __future__ import annotations

import copy
import math
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from attach_parts import STEPS, adamw, attached, batch, loop, loss_of, network, probe
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.utils import parametrizations, parametrize
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.checkpoint import checkpoint

import hdet
from hdet.controllers import Hold
from hdet.errors import CheckpointError, ConfigError, StepError
from hdet.evidence import Contrast, MixedDifference
from hdet.overlay.hooks import Hook, first_after_step
from hdet.overlay.lent_bindings import LentGroups
from hdet.replicas import gradients


def train(model: nn.Module, optimizer: torch.optim.Optimizer, search: hdet.Search, steps: int) -> None:
    for step in range(steps):
        search.loss(loss_of(model, batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


def other_weights() -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(3)
    return {name: torch.randn(value.shape, generator=numbers) for name, value in network().state_dict().items()}


@pytest.mark.parametrize("training", [True, False], ids=["train mode", "eval mode"])
def test_weights_loaded_after_attach_are_those_the_run_sets_out_from(training: bool, assert_same: Any) -> None:
    histories = []
    for late in (False, True):
        model = network()
        if not late:
            model.load_state_dict(other_weights())
        optimizer = adamw(model)
        search = attached(model, optimizer, exclude=("dropout",), micro_batches=1)
        if late:
            model.load_state_dict(other_weights())
        torch.manual_seed(0)
        train(model.train(training), optimizer, search, 10)
        histories.append([record.estimates for record in search.history])
    assert_same(histories[1], histories[0])


def test_where_the_first_window_fails_weights_loaded_after_attach_come_back() -> None:
    model = network()
    optimizer = adamw(model)
    search = attached(model, optimizer, micro_batches=1)
    model.load_state_dict(other_weights())
    said = "at step 5 hdet put the model and the optimizer back to step 0: a loss, a weight or a buffer was not finite"
    train(model, optimizer, search, 4)
    search.loss(loss_of(model, batch(4)) * math.nan).backward()
    with pytest.warns(UserWarning, match=said):
        optimizer.step()
    assert all(torch.equal(value, other_weights()[name]) for name, value in model.state_dict().items())


def test_a_guard_that_goes_back_says_why() -> None:
    model = network()
    optimizer = adamw(model)

    def wreck_it(*_: object) -> None:
        if search.engine.step_count == 9:
            nn.init.constant_(model[3].bias[:1], 1e30)

    optimizer.register_step_post_hook(wreck_it)
    search = attached(model, optimizer, micro_batches=1)
    train(model, optimizer, search, 9)
    why = "the held-out loss was far above all that it had been, or not finite"
    with pytest.warns(UserWarning, match=f"at step 10 hdet put the model and the optimizer back to step 5: {why};"):
        train(model, optimizer, search, 1)


def test_a_plain_runs_scheduler_loaded_after_attach_is_refused() -> None:
    model = network()
    optimizer = adamw(model)
    scheduler = ExponentialLR(optimizer, 0.99)
    for step in range(3):
        loss_of(model, batch(step)).backward()
        optimizer.step()
        scheduler.step()
    states = optimizer.state_dict(), scheduler.state_dict()
    model = network()
    optimizer = adamw(model)
    scheduler = ExponentialLR(optimizer, 0.99)
    search = attached(model, optimizer, scheduler=scheduler)
    optimizer.load_state_dict(states[0])
    scheduler.load_state_dict(states[1])
    with pytest.raises(StepError, match="its state, of a run under way, was loaded in between"):
        train(model, optimizer, search, 1)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("passes", [1, 3], ids=["GradScaler leaves steps out", "scheduler steps in each pass"])
def test_a_scheduler_may_be_ahead_of_the_first_step(passes: int) -> None:
    model = network()
    optimizer = adamw(model)
    scheduler = ExponentialLR(optimizer, 0.99)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127 if passes == 1 else 1.0)
    search = attached(model, optimizer, scheduler=scheduler, micro_batches=passes)
    for step in range(6):
        for part in range(passes):
            scaler.scale(search.loss(loss_of(model, batch(step, part)))).backward()
            scheduler.step()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert search.engine.step_count > 0


def test_beyond_the_end_of_the_run_a_scheduler_goes_where_it_will() -> None:
    """More steps than `total_steps`, where the scheduler has not ended: its rate, by the factor that was learned."""
    model = network()
    optimizer = adamw(model)
    scheduler = ExponentialLR(optimizer, 0.99)
    search = attached(model, optimizer, scheduler=scheduler, micro_batches=1)
    inside: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: inside.append(optimizer.param_groups[0]["lr"]))
    for step in range(STEPS + 5):
        search.loss(loss_of(model, batch(step))).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert search.finished
    factor = search.shifts["learning_rate"].factor
    assert factor != 1.0
    assert inside[STEPS:] == pytest.approx([3e-3 * 0.99**step * factor for step in range(STEPS, STEPS + 5)])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(3e-3 * 0.99 ** (STEPS + 5))


def test_the_state_of_a_search_of_other_knobs_is_refused_by_name() -> None:
    states = []
    for knobs in ((), (hdet.Beta2(),)):
        model = network()
        search = attached(model, adamw(model), knobs=knobs)
        states.append(search.state_dict())
    with pytest.raises(CheckpointError, match="the state is of a search that moves"):
        search.load_state_dict(states[0])


def test_where_a_part_of_a_state_is_damaged_the_search_is_as_it_was(assert_same: Any) -> None:
    model = network()
    optimizer = adamw(model)
    search = attached(model, optimizer, micro_batches=1)
    train(model, optimizer, search, 13)
    state = copy.deepcopy(search.state_dict())
    state["engine"]["collectors"][-1] = {}
    model = network()
    optimizer = adamw(model)
    search = attached(model, optimizer, micro_batches=1)
    before, rates = search.state_dict(), [group["lr"] for group in optimizer.param_groups]
    with pytest.raises(CheckpointError, match=r"cannot be loaded \(KeyError"):
        search.load_state_dict(state)
    after = search.state_dict()
    for state in (after, before):
        state["engine"]["converged"].pop("optimizer")  # which has an empty entry for each parameter now
    assert_same(after, before)
    assert [group["lr"] for group in optimizer.param_groups] == rates


def test_a_state_of_other_micro_batches_is_refused_after_steps() -> None:
    states = []
    for passes in (2, 3):
        model = network()
        optimizer = adamw(model)
        search = attached(model, optimizer, micro_batches=passes)
        for part in range(passes):
            search.loss(loss_of(model, batch(0, part))).backward()
        optimizer.step()
        states.append(search.state_dict())
    with pytest.raises(CheckpointError, match="micro-batches a step, and this search has made steps of 3"):
        search.load_state_dict(states[0])
    told = attached(model := network(), adamw(model), micro_batches=3)
    with pytest.warns(UserWarning, match="the state is of 2 micro-batches a step, and this run was told 3"):
        told.load_state_dict(states[0])
    assert told.engine.step_count == 1
    assert len(told.engine.replicas) == 2


def test_a_state_of_before_the_end_goes_on_as_if_the_run_had_not_been_ended(assert_same: Any) -> None:
    ends, tails = [], []
    for ended in (False, True):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        search = attached(model, optimizer, micro_batches=1)
        torch.manual_seed(0)
        loop(model, optimizer, search=search, stop=22)
        state = copy.deepcopy(search.state_dict())
        if ended:
            loop(model, optimizer, search=search, start=22, stop=28)
            search.finish()
            assert search.history.latest[-1].tail == {}
            search.load_state_dict(state)
        torch.manual_seed(1)
        loop(model, optimizer, search=search, start=22)
        ends.append(list(model.parameters()))
        tails.append(search.history.latest[-1].tail)
    assert tails[1] == tails[0] != {}
    assert_same(*ends)


def test_a_refused_state_of_other_micro_batches_leaves_the_passes_of_a_step(assert_same: Any) -> None:
    model = network()
    optimizer = adamw(model)
    other = attached(model, optimizer, total_steps=STEPS // 2, micro_batches=4)
    loop(model, optimizer, search=other, stop=7, parts=lambda step: 4)
    state = other.state_dict()
    ends = []
    for told in (None, 2):
        for refused in (False, True):
            torch.manual_seed(0)
            model = network()
            optimizer = adamw(model)
            search = attached(model, optimizer, micro_batches=told)
            if refused:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    with pytest.raises(CheckpointError, match="a run of another length is another search"):
                        search.load_state_dict(state)
            loop(model, optimizer, search=search, stop=12, parts=lambda step: 2)
            assert len(search.engine.replicas) == 2
            ends.append(list(model.parameters()))
    assert_same(ends[0], ends[1])
    assert_same(ends[2], ends[3])


def test_replicas_that_were_given_stay_as_many_where_the_state_has_others() -> None:
    states = []
    for seats in (4, 2):
        model = network()
        optimizer = adamw(model)
        search = attached(model, optimizer, replicas=hdet.micro_batches(model, optimizer, seats))
        if states:
            with pytest.warns(UserWarning, match="could not go on in the window") as said:
                search.load_state_dict(states[0])
            assert len(said) == 1
            assert search.engine.step_count == 5
        loop(model, optimizer, search=search, stop=7, parts=lambda step: 2 if states else 4)
        states.append(search.state_dict())
    assert [state["micro_batches"] for state in states] == [4, 2]


class Checkpointed(nn.Module):
    """Its hidden layer runs again in backward."""

    def __init__(self, reentrant: bool, frozen: bool) -> None:
        super().__init__()
        first, tanh, dropout, self.head = network()
        self.first, self.hidden = first.requires_grad_(not frozen), nn.Sequential(tanh, dropout, nn.Linear(16, 16))
        self.reentrant = reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs).requires_grad_()
        logits: torch.Tensor = self.head(checkpoint(self.hidden, hidden, use_reentrant=self.reentrant))
        return logits


@pytest.mark.parametrize("frozen", [True, False], ids=["adapters", "all"])
def test_reentrant_checkpointing_of_what_the_probe_differentiates_is_refused(frozen: bool) -> None:
    model = Checkpointed(False, frozen)
    assert all(gradient.any() for gradient in gradients.summed(model, [loss_of(model, batch(0))]))
    model = Checkpointed(True, frozen)
    loss_of(model, batch(0)).backward()
    with pytest.raises(StepError, match=r"which hides parameters from torch\.autograd\.grad"):
        gradients.summed(model, [loss_of(model, batch(0))])


def test_hooks_on_parameters_are_called_by_the_probe_in_eval_mode_and_those_after_accumulation_are_not() -> None:
    model = network()
    optimizer = adamw(model)
    search = attached(model, optimizer, micro_batches=1, knobs=[hdet.Dropout(evidence=Contrast())])
    told: dict[str, list[bool]] = {"before": [], "after": [], "all": []}
    weight = model[0].weight
    weight.register_hook(lambda _: told["before"].append(model.training))
    weight.register_post_accumulate_grad_hook(lambda _: told["after"].append(model.training))
    register_multi_grad_hook(list(model.parameters()), lambda _: told["all"].append(model.training))
    train(model, optimizer, search, STEPS)
    assert [own.count(True) for own in told.values()] == [STEPS] * 3
    assert told["before"].count(False) > 0
    assert told["after"].count(False) == told["all"].count(False) == 0


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_on_all_gradients_are_put_back_and_a_mask_is_in_force(fails: bool) -> None:
    """But for one that was taken off meanwhile."""
    model = network()
    seen: list[int] = []
    own = list(model.parameters())
    first = register_multi_grad_hook(own, lambda _: seen.append(1))
    register_multi_grad_hook(own, lambda _: seen.append(2))
    model[0].weight.register_hook(lambda gradient: gradient * 0.0)

    def meanwhile(*_: object) -> None:
        first.remove()
        if fails:
            raise ZeroDivisionError

    model[3].register_full_backward_pre_hook(meanwhile)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        found = gradients.summed(model, [loss_of(model, batch(0))])
        assert [bool(gradient.any()) for gradient in found] == [False, True, True, True]
    assert seen == []
    fails = False
    loss_of(model, batch(0)).backward()
    assert seen == [2]


def test_a_hook_on_parameters_and_activations_at_once_is_told_of() -> None:
    model = network()

    def watch(module: nn.Module, _: Any, output: Tensor) -> None:
        register_multi_grad_hook([output, module.weight], lambda _: None)

    handle = model[0].register_forward_hook(watch)
    with pytest.raises(StepError, match="of parameters and of other tensors at once"):
        gradients.summed(model, [loss_of(model, batch(0))])
    handle.remove()
    assert any(gradient.any() for gradient in gradients.summed(model, [loss_of(model, batch(0))]))


def scaled(**options: Any) -> hdet.Search:
    """Two micro-batches, whose losses are multiplied."""
    model = network()
    optimizer = adamw(model)
    search = attached(model, optimizer, micro_batches=2, noise_scale=True)
    scaler = torch.amp.GradScaler("cpu", **options)
    torch.manual_seed(0)
    for step in range(STEPS):
        for part in range(2):
            scaler.scale(search.loss(loss_of(model, batch(step, part)))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return search


def test_evidence_is_free_of_the_scale_of_a_grad_scaler() -> None:
    searches = [scaled(init_scale=1.0), scaled(init_scale=2.0**16), scaled(init_scale=2.0**10, growth_interval=3)]
    told = [[record.estimates["dropout"]["slope"] for record in search.history] for search in searches]
    assert any(told[0])
    assert told[1] == pytest.approx(told[0], rel=1e-3)
    assert told[2] == pytest.approx(told[0], rel=1e-3)
    noise = [search.history.windows[-1].noise_scale["noise"] for search in searches]
    assert noise == pytest.approx([noise[0]] * 3, rel=1e-3)


def test_a_grad_scaler_that_is_switched_off_is_none() -> None:
    """As loops have it that may or may not run in half precision."""
    search = scaled(enabled=False)
    assert search.finished
    assert search.engine.home.scaler is None
    assert any(record.estimates["dropout"]["slope"] for record in search.history)


def test_losses_that_are_told_of_without_a_pass_that_is_seen() -> None:
    """Layers called one by one; or eval mode, to hold what a pretrained BatchNorm knows."""
    model = network()
    optimizer = adamw(model)
    search = attached(model, optimizer, exclude=("dropout",))
    for step in range(STEPS):
        inputs, labels = batch(step)
        for layer in model:
            inputs = layer(inputs)
        search.loss(nn.functional.cross_entropy(inputs, labels)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert search.shifts["learning_rate"].factor > 1.5
    assert search.history.windows[0].losses[0] == pytest.approx(1.1, abs=0.2)


@pytest.mark.parametrize("told", [False, True])
def test_a_loss_that_has_parameters_is_trained_with_the_model(told: bool) -> None:
    """The ways out that are named lead through: one module that holds both, and passes that are told of."""
    model, head = network(), nn.Linear(3, 3)
    nn.init.eye_(head.weight)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-3)
    with pytest.raises(ConfigError, match=r"one module that holds both, as nn.ModuleList\(\[model, loss\]\)"):
        attached(model, optimizer)
    held_out = hdet.Probe(lambda both, given: loss_of(nn.Sequential(*both), given), probe().batches)
    both = nn.ModuleList([model, head])
    search = hdet.attach(both, optimizer, probe=held_out, total_steps=STEPS, window=5, quiet=True)
    for step in range(STEPS):

        def run(step: int = step) -> Tensor:
            inputs, labels = batch(step)
            return nn.functional.cross_entropy(head(model(inputs)), labels)

        if not told:
            run().backward()
            with pytest.raises(
                StepError, match=r"parts of it one by one, run each pass by search.training_pass\(run\)"
            ):
                optimizer.step()
            return
        search.training_pass(run).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert search.finished
    assert search.shifts["learning_rate"].factor > 1.5


def test_as_a_window_closes_evidence_tries_other_values_of_what_acts_in_passes() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    knob = hdet.Dropout(evidence=MixedDifference(), controller=Hold())
    objective = hdet.Objective(loss_of, [batch(step) for step in range(8)])
    search = hdet.attach(
        model, optimizer, probe=probe(), total_steps=20, window=5, quiet=True, objective=objective, knobs=[knob]
    )
    for step in range(5):
        search.loss(loss_of(model, batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    (record,) = search.history
    assert record.estimates["dropout"]["slope"] != 0.0
    assert model[2].p == 0.2


def test_an_objective_inside_autocast_is_of_the_weights_as_they_are() -> None:
    model = nn.Linear(4, 1)
    objective = hdet.Objective(lambda model, x: model(x).square().mean(), [torch.ones(2, 4), torch.zeros(2, 4)])
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(torch.ones(2, 4))
        model.weight.fill_(1.0)
        model.bias.zero_()
        assert float(objective.evaluate(model, torch.ones(2, 4))) == 16.0


def test_batches_that_can_be_gone_through_once_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a probe's batches are gone through in every window, and a list_iterator"):
        hdet.Probe(loss_of, iter([batch(0), batch(1)]))


@pytest.mark.parametrize("within", [False, True])
def test_a_step_inside_autocast_is_judged_by_the_weights_that_it_moves(within: bool) -> None:
    """Autocast keeps the weights' low-precision copies to the end of its outermost block."""
    model = network()
    optimizer = adamw(model)
    search = attached(model, optimizer, exclude=("dropout",))
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = search.loss(loss_of(model, batch(step)))
            if within:
                loss.backward()
                optimizer.step()
        if not within:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
    slopes = [record.estimates["learning_rate"]["slope"] for record in search.history]
    assert len(set(slopes)) > 4
    assert search.shifts["learning_rate"].factor > 1.5


def test_a_step_inside_parametrizes_cache_is_judged_by_the_weights_that_it_moves(assert_same: Any) -> None:
    """It keeps what parametrized weights were worked out to, to the end of its outermost block."""
    found = []
    for keeps in (parametrize.cached, nullcontext):
        torch.manual_seed(7)
        model = network()
        parametrizations.weight_norm(model[0])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        search = attached(model, optimizer)
        for step in range(STEPS):
            with keeps():
                search.loss(loss_of(model, batch(step))).backward()
                optimizer.step()
            optimizer.zero_grad()
        found.append([record.estimates for record in search.history])
    assert_same(*found)


@pytest.mark.parametrize("micro_batches", [None, 1])
@pytest.mark.parametrize("cleared", ["between", "after"])
def test_a_step_left_out_is_none_wherever_gradients_are_cleared(cleared: str, micro_batches: int | None) -> None:
    model = network()
    optimizer = adamw(model)
    search = attached(model, optimizer, micro_batches=micro_batches)
    iterations = left_out = 0
    while not search.finished:
        sound = iterations == 0 or iterations % 6 > 0
        loss = loss_of(model, batch(iterations)) * (1.0 if sound else math.nan)
        search.loss(loss)
        if cleared == "between":
            optimizer.zero_grad()
        loss.backward()
        if sound:
            optimizer.step()
        left_out += not sound
        if cleared == "after":
            optimizer.zero_grad()
        iterations += 1
    assert left_out >= 6
    assert iterations == STEPS + left_out
    assert len(search.engine.replicas) == 1
    assert not [fault for record in search.history for fault in record.faults]
    assert all(math.isfinite(record.loss) for record in search.history)


def test_passes_before_gradients_are_cleared_are_no_micro_batches() -> None:
    """A scaler that skips the first steps, where gradients are cleared between forward and backward."""
    model = network()
    optimizer = adamw(model)
    search = attached(model, optimizer)
    for iteration in range(8):
        loss = search.loss(loss_of(model, batch(iteration)))
        optimizer.zero_grad()
        loss.backward()
        if iteration > 2:
            optimizer.step()
    assert len(search.engine.replicas) == 1
    assert search.engine.step_count == 5


@pytest.mark.parametrize("knows", [False, True])
def test_a_scheduler_that_a_hook_steps_drives_the_rate(knows: bool) -> None:
    model = network()
    optimizer = adamw(model)
    scheduler = ExponentialLR(optimizer, 0.9)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    search = attached(model, optimizer, **({"scheduler": scheduler} if knows else {"schedule": None}))
    train(model, optimizer, search, 10)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(3e-3 * 0.9**10)


@pytest.mark.parametrize("driven", [False, True])
def test_a_step_that_raises_leaves_nothing_of_hdets_behind(driven: bool) -> None:
    model = network()
    optimizer = adamw(model)
    search = attached(model, optimizer, **({} if driven else {"schedule": None}))
    fails = False

    def fail(*_: Any) -> None:
        if fails:
            raise MemoryError("while it steps")

    optimizer.register_step_pre_hook(fail)
    for step in range(10):
        search.loss(loss_of(model, batch(step))).backward()
        fails = step == 6
        if fails:
            with pytest.raises(MemoryError):
                optimizer.step()
            assert [group["lr"] for group in optimizer.state_dict()["param_groups"]] == [3e-3, 1e-3]
        else:
            optimizer.step()
        optimizer.zero_grad()
    assert search.engine.step_count == 9
    assert [group["lr"] for group in optimizer.param_groups] == [3e-3, 1e-3]


@pytest.mark.parametrize("at", [STEPS // 2 - 1, STEPS - 1])
def test_a_run_goes_on_where_closing_a_window_was_interrupted(at: int) -> None:
    """As by hand, in a notebook, while the probe runs; in the last window the step after it ends the run."""
    model = network()
    optimizer = adamw(model)
    stops = False

    def loss(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal stops
        if stops:
            stops = False
            raise KeyboardInterrupt
        return loss_of(model, given)

    held_out = hdet.Probe(loss, probe().batches)
    search = hdet.attach(model, optimizer, probe=held_out, total_steps=STEPS, window=STEPS // 4, quiet=True)
    steps = 0
    while not search.finished:
        assert steps <= STEPS
        search.loss(loss_of(model, batch(steps))).backward()
        stops = steps == at
        with pytest.raises(KeyboardInterrupt) if stops else nullcontext():
            optimizer.step()
        optimizer.zero_grad()
        steps += 1
    assert steps == STEPS + (at == STEPS - 1)
    assert [record.stop for record in search.history][-1] == search.engine.step_count == STEPS
    with pytest.raises(StepError, match="the run is over"):
        train(model, optimizer, search, 1)


def test_what_could_not_be_taken_out_after_a_step_is_taken_out_before_the_next_pass() -> None:
    """As where the loop is stopped by hand at that moment, and goes on."""
    model = network()
    optimizer = adamw(model)
    search = attached(model, optimizer)
    train(model, optimizer, search, 3)

    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    search.loss(loss_of(model, batch(3))).backward()
    with pytest.MonkeyPatch.context() as patched:
        stop = first_after_step(optimizer, Hook(lambda *_: patched.setattr(LentGroups, "take_out", interrupted)))
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    stop.remove()
    assert optimizer.param_groups[0]["lr"] != 3e-3
    model(batch(4)[0])
    assert [group["lr"] for group in optimizer.param_groups] == [3e-3, 1e-3]


def test_a_rate_that_groups_share_is_shared_again() -> None:
    model = network()
    rate = torch.tensor(3e-3)
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[3].parameters())}]
    optimizer = torch.optim.AdamW(groups, lr=rate)
    with pytest.raises(ConfigError, match=r"parameter groups share one tensor as their learning rate"):
        attached(model, optimizer, rates="groups", schedule=None)
    with attached(model, optimizer, rates="groups") as search:
        train(model, optimizer, search, STEPS)
        assert len(set(search.shifts)) > 2
    assert all(group["lr"] is rate for group in optimizer.param_groups)
    assert float(rate) == pytest.approx(3e-3)


@pytest.mark.parametrize(
    ("every", "stepped", "told"),
    [
        (1, lambda step: False, ["has made 0 steps in 10 optimizer"]),
        (1, lambda step: step % 2 == 1, ["has made 10 steps in 20 optimizer"]),
        (1, lambda step: step % 10 < 7, ["has made 14 steps in 20 optimizer"]),
        (1, lambda step: step % 10 < 8, []),
        (1, lambda step: step >= 5, []),
        (1, lambda step: step % 10 < 7 or step > 10, []),
        (2, lambda step: step % 4 == 3, ["has made 10 steps in 40 optimizer"]),
        (8, lambda step: step % 8 == 7, []),
        (1, lambda step: True, []),
    ],
)
def test_a_scheduler_that_is_stepped_more_rarely_than_told_is_noticed(every: int, stepped: Any, told: Any) -> None:
    """One that only begins late, as after a warm-up of the loop's own, is not."""
    model = network()
    optimizer = adamw(model)
    scheduler = ExponentialLR(optimizer, 0.9)
    search = attached(model, optimizer, scheduler=scheduler, scheduler_every=every, total_steps=44)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(44):
            search.loss(loss_of(model, batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
            if stepped(step):
                scheduler.step()
    said = [str(one.message) for one in caught if "optimizer steps, and hdet looks ahead as if" in str(one.message)]
    assert [words in one for words, one in zip(told, said, strict=True)] == [True] * len(told)


class ByEpochs:
    """As timm's schedulers are made: told the number of the epoch."""

    t_in_epochs = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.rates = [group["lr"] for group in optimizer.param_groups]

    def step(self, epoch: int) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * 0.9**epoch

    def step_update(self, update: int) -> None:
        pass


def test_of_a_scheduler_that_is_told_its_epochs_one_late_nothing_is_said() -> None:
    length = 4
    model = network()
    optimizer = adamw(model)
    scheduler = ByEpochs(optimizer)
    search = attached(model, optimizer, scheduler=scheduler, scheduler_every=length)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(22):
            search.loss(loss_of(model, batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % length == 0:
                scheduler.step((step + 1) // length - 1)


@pytest.mark.parametrize("loss", [0.5, None, torch.ones(4)])
def test_a_loss_that_is_none_is_refused(loss: Any) -> None:
    model = network()
    search = attached(model, adamw(model))
    with pytest.raises(StepError, match=r"search.loss takes the training loss, a tensor of one number"):
        search.loss(loss)
    with pytest.raises(StepError, match="the training loss is complex, and losses are compared by one real number"):
        search.loss(torch.ones((), dtype=torch.complex64))


def test_a_rate_that_the_optimizer_works_out_is_refused() -> None:
    model = network()
    optimizer = adamw(model)
    optimizer.param_groups[1]["lr"] = None
    with pytest.raises(ConfigError, match=r"parameter group 1 has lr=None"):
        attached(model, optimizer)


def test_a_metric_in_place_of_the_probes_loss_is_refused_where_its_gradient_is_needed() -> None:
    model = network()
    optimizer = adamw(model)

    def accuracy(model: nn.Module, given: Any) -> torch.Tensor:
        return (model(given[0]).argmax(dim=1) == given[1]).float().mean()

    judged = hdet.Probe(accuracy, [batch(-1, part) for part in range(8)])
    dropout = hdet.Dropout(evidence=hdet.evidence.Contrast())
    search = hdet.attach(model, optimizer, probe=judged, total_steps=STEPS, knobs=[dropout], quiet=True)
    with pytest.raises(StepError, match=r"the probe's loss has no gradient"):
        train(model, optimizer, search, STEPS)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sparse_gradients_and_their_momentum_are_searched(momentum: float) -> None:
    class Words(nn.Sequential):
        """The sign of each input is a word."""

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            words: torch.Tensor = super().forward((inputs > 0).long()).mean(dim=1)
            return words

    model = Words(nn.Embedding(2, 8, sparse=True), nn.Dropout(0.2), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=momentum)
    search = attached(model, optimizer, knobs=[hdet.Dropout(evidence=hdet.evidence.Contrast())])
    train(model, optimizer, search, STEPS)
    assert search.finished
    assert search.shifts["learning_rate"].factor != 1.0


def test_complex_parameters_are_refused_beside_dropout() -> None:
    model = network()
    model.register_parameter("turns", nn.Parameter(torch.ones(3, dtype=torch.complex64)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pytest.raises(ConfigError, match=r"the model has complex parameters, .* exclude="):
        attached(model, optimizer)
    attached(model, optimizer, exclude=("dropout",)).detach()


def test_integers_that_the_optimizer_holds_are_left_alone() -> None:
    model = network()
    packed = nn.Parameter(torch.arange(6, dtype=torch.uint8), requires_grad=False)
    model.register_parameter("packed", packed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    search = attached(model, optimizer)
    train(model, optimizer, search, STEPS)
    assert search.finished
    assert packed.tolist() == [0, 1, 2, 3, 4, 5]
