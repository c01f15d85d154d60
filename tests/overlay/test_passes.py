"""What is one training pass of a loop and what is none, shown by what the same passes teach an explicit engine."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attach_parts import STEPS, batch, explicit, loss_of, network, probe
from torch import Tensor, nn
from torch.nn import functional as F

import hdet

PARTS = 2
Given = tuple[Tensor, Tensor]


class Calling(nn.Module):
    """Calls itself to refine what it said."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, inputs: Tensor, again: int = 2) -> Tensor:
        if again == 0:
            return self.layers(inputs)  # type: ignore[no-any-return]
        return self.layers(inputs) + self(inputs, again - 1) / 2  # type: ignore[no-any-return]


class Failing(nn.Module):
    """Runs out of memory, now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()
        self.fails = False

    def forward(self, inputs: Tensor) -> Tensor:
        if self.fails:
            raise MemoryError("no room for this batch")
        return self.layers(inputs)  # type: ignore[no-any-return]


class Scaled(nn.Module):
    """Returns the parameter that its loss is scaled by, as contrastive models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = network(), nn.Parameter(torch.tensor(1.0))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(inputs), self.scale


def scaled(model: nn.Module, given: Given) -> Tensor:
    output, scale = model(given[0])
    return F.cross_entropy(scale * output, given[1])


def penalised(model: nn.Module, given: Given) -> Tensor:
    """With a penalty on the gradient in the inputs, which `torch.autograd.grad` is asked for in mid-pass."""
    inputs = given[0].requires_grad_()
    output = model(inputs)
    [gradient] = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
    return F.cross_entropy(output, given[1]) + 0.1 * gradient.square().mean()


def penalised_in_weights(model: nn.Module, given: Given) -> Tensor:
    """The same, in the weights."""
    loss = loss_of(model, given)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 0.1 * sum(gradient.square().sum() for gradient in gradients)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)


OPTIONS: dict[str, Any] = {"total_steps": STEPS, "probe": probe(), "quiet": True, "micro_batches": PARTS, "window": 5}


def decided(history: hdet.History) -> list[Any]:
    """Without what it cost, and without slopes, which are those of the gradients as the loop divided them."""
    return [
        (r.bases, r.values, r.losses, r.moves, {name: told["t"] for name, told in r.estimates.items()}) for r in history
    ]


def written(
    make: Callable[[], nn.Module], compute: Callable[[nn.Module, Given], Tensor], **more: Any
) -> tuple[list[Any], Any]:
    """The loop written for the engine: what it decided, and the weights."""
    torch.manual_seed(7)
    model = make()
    optimizer = adamw(model)
    engine = hdet.recommended(model, optimizer, **OPTIONS | more)
    explicit(engine, model, optimizer, compute)
    assert any(record.estimates["dropout"]["stderr"] for record in engine.history)
    return decided(engine.history), model.state_dict()


class Attached:
    """The same run under `hdet.attach`, one step at a time."""

    def __init__(self, make: Callable[[], nn.Module], **more: Any) -> None:
        torch.manual_seed(7)
        self.model = make()
        self.optimizer = adamw(self.model)
        self.search = hdet.attach(self.model, self.optimizer, **{**OPTIONS, "rates": "together", **more})

    def backward(self, compute: Callable[[nn.Module, Given], Tensor], given: Given) -> None:
        (self.search.loss(compute(self.model, given)) / PARTS).backward()

    def steps(self) -> Iterator[int]:
        for step in range(STEPS):
            yield step
            self.optimizer.step()
            self.optimizer.zero_grad()

    def require(self, expected: tuple[list[Any], Any], assert_same: Any) -> None:
        assert decided(self.search.history) == expected[0]
        assert_same(self.model.state_dict(), expected[1])


@pytest.fixture(autouse=True)
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("compute", [penalised, penalised_in_weights])
def test_a_gradient_asked_for_in_mid_pass_is_part_of_it(compute: Any, assert_same: Any) -> None:
    run = Attached(network)
    for step in run.steps():
        for part in range(PARTS):
            run.backward(compute, batch(step, part))
    run.require(written(network, compute), assert_same)


def test_a_model_that_calls_itself_makes_one_pass(assert_same: Any) -> None:
    run = Attached(Calling)
    for step in run.steps():
        for part in range(PARTS):
            run.backward(loss_of, batch(step, part))
    run.require(written(Calling, loss_of), assert_same)


def test_a_parameter_that_is_returned_outlives_its_pass(assert_same: Any) -> None:
    """A hook on it would be called in all later ones, too."""
    run = Attached(Scaled, probe=hdet.Probe(scaled, probe().batches))
    for step in run.steps():
        for part in range(PARTS):
            run.backward(scaled, batch(step, part))
    assert not run.model.scale._backward_hooks
    run.require(written(Scaled, scaled, probe=hdet.Probe(scaled, probe().batches)), assert_same)


def test_a_forward_that_raises_is_no_pass(assert_same: Any) -> None:
    run = Attached(Failing)
    dropout = run.model.layers[2]
    resting = dropout.p
    for step in run.steps():
        for part in range(PARTS):
            if step % 3 == part:
                run.model.fails = True
                with pytest.raises(MemoryError):
                    run.model(batch(step, part)[0])
                run.model.fails = False
                assert dropout.p == resting
            run.backward(loss_of, batch(step, part))
        if step % 4 == 0:
            run.model.fails = True
            with pytest.raises(MemoryError):
                run.model(batch(step)[0])
            run.model.fails = False
    run.require(written(Failing, loss_of), assert_same)


def test_an_interrupted_forward_is_no_pass() -> None:
    """No hook is called then."""
    run = Attached(network)
    for step in run.steps():
        if step == 2:
            handle = run.model[1].register_forward_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                run.model(batch(step)[0])
            handle.remove()
        for part in range(PARTS):
            run.backward(loss_of, batch(step, part))
    assert run.search.finished


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_a_forward_for_a_metric_is_no_pass(when: str, counted: bool, assert_same: Any) -> None:
    """In train mode, with gradients enabled, and nothing comes back through it."""
    run = Attached(network, **({"micro_batches": None} if counted else {}))
    for step in run.steps():
        for part in range(PARTS):
            if when == "before" or (when == "between" and part == 1):
                look(run.model)
            run.backward(loss_of, batch(step, part))
        if when == "after":
            look(run.model)
    if counted:
        assert len(run.search.engine.replicas) == PARTS
        assert run.search.finished
        assert any(record.estimates["dropout"]["stderr"] for record in run.search.history)
    else:
        run.require(written(network, loss_of), assert_same)


def look(model: nn.Module) -> None:
    state = torch.get_rng_state()
    model(batch(-1)[0]).argmax(dim=1)
    torch.set_rng_state(state)


def test_a_call_of_the_frozen_model_is_no_pass(assert_same: Any) -> None:
    """As of a generator in its discriminator's turns, whose loss comes back through nothing of it."""
    judge = nn.Linear(3, 1)
    run = Attached(network)
    for step in run.steps():
        state = torch.get_rng_state()
        run.model.requires_grad_(False)
        for turn in range(2):
            judge(run.model(batch(-1, turn)[0])).mean().backward()
        run.model.requires_grad_(True)
        torch.set_rng_state(state)
        for part in range(PARTS):
            run.backward(loss_of, batch(step, part))
    run.require(written(network, loss_of), assert_same)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_passes_of_a_first_step_that_was_skipped_are_not_counted(set_to_none: bool) -> None:
    """As by a GradScaler, whose first scale is too large more often than not."""
    run = Attached(network, micro_batches=None)
    for skips in (True, True, False):
        for part in range(PARTS):
            run.backward(loss_of, batch(0, part))
        if not skips:
            run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=set_to_none)
    assert len(run.search.engine.replicas) == PARTS
    assert run.search.engine.step_count == 1


def test_clipped_passes_are_not_taken_for_dropped_ones() -> None:
    """Something has written the gradients of the first pass, and they are not zero."""
    run = Attached(network, micro_batches=None)
    for part in range(PARTS):
        run.backward(loss_of, batch(0, part))
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)
    run.optimizer.step()
    assert len(run.search.engine.replicas) == PARTS


def test_a_call_of_another_thread_without_gradients_is_none_and_disturbs_none() -> None:
    """As of an actor, which acts by the model while a learner trains it."""

    class Acted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()
            self.acts = True

        def forward(self, inputs: Tensor) -> Tensor:
            if self.acts and torch.is_grad_enabled():
                self.acts = False
                actor = threading.Thread(target=self.act, args=(inputs,))
                actor.start()
                actor.join()
                self.acts = True
            return self.layers(inputs)  # type: ignore[no-any-return]

        def act(self, inputs: Tensor) -> None:
            with torch.no_grad():
                self(inputs)

    model = Acted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    search = hdet.attach(model, optimizer, probe=probe(), schedule=None, window=4, quiet=True, guard=None)
    for step in range(8):
        search.loss(loss_of(model, batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    losses = [loss for record in search.history for loss in record.losses]
    assert len(losses) == 2
    assert None not in losses


class Turns(nn.Module):
    """Actor and critic on a shared trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.actor, self.critic = network(), nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        trunk = self.trunk(inputs)
        return self.actor(trunk), self.critic(trunk)


@pytest.mark.parametrize("first", ["zero_grad", "forward"])
def test_the_turn_of_another_optimizer_is_no_micro_batch(first: str) -> None:
    """Nor is its loss the training loss. Gradients of what that one trains alone stay when this one's are cleared."""
    model = Turns()
    actor, critic = (
        torch.optim.SGD([*model.trunk.parameters(), *head.parameters()], lr=0.1) for head in (model.actor, model.critic)
    )
    held_out = hdet.Probe(lambda model, given: F.cross_entropy(model(given[0])[0], given[1]), [batch(-1), batch(-2)])
    options: dict[str, Any] = {"schedule": None, "window": 4, "quiet": True, "guard": None, "exclude": ["dropout"]}
    search = hdet.attach(model, actor, probe=held_out, **options)
    for step in range(8):
        inputs, labels = batch(step)
        for optimizer in (actor, critic):
            if first == "zero_grad":
                optimizer.zero_grad()
            acted, judged = model(inputs)
            loss = F.cross_entropy(acted, labels) if optimizer is actor else judged.square().mean() + 1000.0
            if first == "forward":
                optimizer.zero_grad()
            search.loss(loss).backward()
            optimizer.step()
    assert all(loss is not None and loss < 100 for record in search.history for loss in record.losses)
