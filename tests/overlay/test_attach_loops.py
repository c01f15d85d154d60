"""`hdet.attach` on the loops that people have: each with hdet, whose controllers hold, bit for bit the one without."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import schedulefree
import torch
from attach_parts import HELD, STEPS, adamw, attached, batch, loss_of, network, probe
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import hdet
from hdet.controllers import Hold
from hdet.errors import StepError

Search = hdet.Search | None
Train = Callable[[nn.Module, Any, Search], None]


def told(search: Search, loss: Tensor) -> Tensor:
    return search.loss(loss) if search is not None else loss


def plain(model: nn.Module, optimizer: Any, search: Search) -> None:
    for step in range(STEPS):
        told(search, loss_of(model, batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


def ragged(model: nn.Module, optimizer: Any, search: Search) -> None:
    """Epochs of ten micro-batches, four to a step, the last two in a step of their own."""
    for step in range(STEPS):
        count = 2 if step % 3 == 2 else 4
        for part in range(count):
            (told(search, loss_of(model, batch(step, part))) / 4).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def autocast(model: nn.Module, optimizer: Any, search: Search) -> None:
    for step in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = told(search, loss_of(model, batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def scaled(model: nn.Module, optimizer: Any, search: Search) -> None:
    """A gradient scaler that skips the steps whose gradients overflow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    skipped = 0
    for step in range(STEPS):
        scaler.scale(told(search, loss_of(model, batch(step)))).backward()
        if step % 7 == 3:
            next(p for p in model.parameters() if p.grad is not None).grad.fill_(torch.inf)  # type: ignore[union-attr]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
        optimizer.zero_grad()
    assert skipped > 1
    if search is not None:
        assert search.engine.step_count == STEPS - skipped


def checkpointed(model: nn.Module, optimizer: Any, search: Search) -> None:
    inner = model[0].forward  # type: ignore[index]
    model[0].forward = lambda inputs: checkpoint(inner, inputs, use_reentrant=False)  # type: ignore[index]
    plain(model, optimizer, search)
    del model[0].forward  # type: ignore[index]


def evaluated(model: nn.Module, optimizer: Any, search: Search) -> None:
    """Evaluation between passes, between backward and step, and a forward pass that nothing follows."""
    for step in range(STEPS):
        loss = told(search, loss_of(model, batch(step)))
        with torch.no_grad():
            loss_of(model, batch(step, 5))
        loss.backward()
        model.eval()
        loss_of(model, batch(step, 6))
        model.train()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            torch.manual_seed(step)
            model(batch(step, 7)[0])


def averaged(model: nn.Module, optimizer: Any, search: Search) -> None:
    """A moving average of the weights, which is a deep copy of the model, hooks and all."""
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(STEPS):
        told(search, loss_of(model, batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
        mean.update_parameters(model)
        loss_of(mean, batch(step, 3))
    copy.deepcopy(model)
    with torch.no_grad():
        for own, averaged in zip(model.parameters(), mean.module.parameters(), strict=True):
            own.copy_(averaged)


def frozen(model: nn.Module, optimizer: Any, search: Search) -> None:
    model[0].requires_grad_(False)  # type: ignore[index]
    plain(model, optimizer, search)


def siamese(model: nn.Module, optimizer: Any, search: Search) -> None:
    """Two forward passes to one backward."""
    for step in range(STEPS):
        first, second = model(batch(step)[0]), model(batch(step, 1)[0])
        loss = F.cross_entropy(first, batch(step)[1]) + F.cross_entropy(second, batch(step, 1)[1])
        told(search, loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def streaming(model: nn.Module, optimizer: Any, search: Search) -> None:
    """A running mean in a buffer, which every forward pass moves, in evaluation too."""
    first: Any = model[0]  # type: ignore[index]
    first.register_buffer("mean", torch.zeros(16))

    def centred(module: Any, inputs: Any, output: Tensor) -> Tensor:
        module.mean.lerp_(output.detach().mean(0), 0.1)
        return output - module.mean

    handle = first.register_forward_hook(centred)
    plain(model, optimizer, search)
    handle.remove()


def drawing(model: nn.Module, optimizer: Any, search: Search) -> None:
    """Noise from generators that a layer holds, in evaluation too."""
    first: Any = model[0]  # type: ignore[index]
    first.own, first.numpys, first.pythons = torch.Generator(), np.random.default_rng(3), random.Random(3)

    def noisy(module: Any, inputs: Any, output: Tensor) -> Tensor:
        same = module.numpys.standard_normal() + module.pythons.random()
        return output + 0.1 * torch.randn(output.shape, generator=module.own) + 0.1 * same

    handle = first.register_forward_hook(noisy)
    plain(model, optimizer, search)
    handle.remove()


def functional(model: nn.Module, optimizer: Any, search: Search) -> None:
    """Gradients of a function of the parameters, which stand in the places of the model's for as long as it runs."""

    def loss(parameters: dict[str, Tensor], given: tuple[Tensor, Tensor]) -> Tensor:
        return told(search, F.cross_entropy(functional_call(model, parameters, (given[0],)), given[1]))

    for step in range(STEPS):
        gradients = grad(loss)(dict(model.named_parameters()), batch(step))
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].detach()
        optimizer.step()


def by_example(model: nn.Module, optimizer: Any, search: Search) -> None:
    """A gradient of each example, none longer than 1, as for differential privacy; the mean loss is told afterwards."""

    def loss(parameters: dict[str, Tensor], inputs: Tensor, label: Tensor) -> Tensor:
        return told(search, F.cross_entropy(functional_call(model, parameters, (inputs[None],)), label[None]))

    of_each = vmap(grad_and_value(loss), in_dims=(None, 0, 0), randomness="different")
    for step in range(STEPS):
        gradients, losses = of_each(dict(model.named_parameters()), *batch(step))
        told(search, losses.mean())
        norms = torch.stack([own.flatten(1).norm(dim=1) for own in gradients.values()]).norm(dim=0)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.einsum("n...,n->...", gradients[name].detach(), norms.detach().clamp(min=1.0) ** -1)
        optimizer.step()


class Returning(nn.Module):
    """A model that returns its loss, as those of Hugging Face do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = network()
        self.kind = kind

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.inner(inputs)
        if labels is None:
            return logits
        loss = F.cross_entropy(logits, labels)
        return {"dict": {"loss": loss, "logits": logits}, "tuple": (logits, loss), "itself": loss}[self.kind]


LOOPS: dict[str, Train] = {
    "ragged accumulation": ragged,
    "autocast": autocast,
    "gradient scaler that skips": scaled,
    "activation checkpointing": checkpointed,
    "evaluation inside": evaluated,
    "averaged weights": averaged,
    "frozen part": frozen,
    "two forwards to a backward": siamese,
    "state in evaluation": streaming,
    "generators of a layer's own": drawing,
    "gradients of a function": functional,
    "gradients of each example": by_example,
}
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adamw": adamw,
    "fused": lambda model: adamw(model, fused=True),
    "tensor rates": lambda model: torch.optim.AdamW(
        model.parameters(), lr=torch.tensor(1e-3), weight_decay=0.1, fused=True
    ),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3),
    "chained": lambda model: hdet.ChainedOptimizer(
        torch.optim.SGD([p for p in model.parameters() if p.ndim > 1], lr=0.1, momentum=0.9, weight_decay=1e-3),
        torch.optim.AdamW([p for p in model.parameters() if p.ndim <= 1], lr=1e-3, weight_decay=0.1),
    ),
    "schedule-free": lambda model: schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-2, weight_decay=0.01),
}


def both(train: Train, build: Callable[[nn.Module], Any], **options: Any) -> tuple[list[Any], hdet.Search]:
    """What the loop ends in without hdet and with it."""
    ends: list[Any] = []
    search: Search = None
    for searched in (False, True):
        torch.manual_seed(7)
        model = network()
        optimizer = build(model)
        if hasattr(optimizer, "train"):
            optimizer.train()
        if searched:
            given: dict[str, Any] = {"probe": probe(), "schedule": None, "knobs": HELD, "window": 5, "tail": None}
            search = hdet.attach(model, optimizer, quiet=True, **{**given, **options})
        train(model, optimizer, search)
        ends.append(copy.deepcopy([model.state_dict(), optimizer.state_dict(), torch.get_rng_state()]))
    assert search is not None
    return ends, search


@pytest.mark.parametrize("evidence", [hdet.evidence.Line(), hdet.evidence.GroupLines(), hdet.evidence.Contrast()])
def test_a_probe_that_draws_leaves_the_trainings_numbers(evidence: hdet.evidence.Evidence, assert_same: Any) -> None:
    """A shuffled loader, and a model that drops out in evaluation too. (`Contrast` explores, so weights differ.)"""
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*probe().batches, strict=True)))
    loader = DataLoader(data, batch_size=8, shuffle=True)

    def loss(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(F.dropout(model(given[0]), 0.1, training=True), given[1])

    explored = isinstance(evidence, hdet.evidence.Contrast)
    own = hdet.Dropout if explored else hdet.LearningRate
    knobs = [own(controller=Hold(), evidence=evidence), *(knob for knob in HELD if not isinstance(knob, own))]
    ends, search = both(plain, adamw, probe=hdet.Probe(loss, loader), knobs=knobs)
    assert len(search.history) == STEPS // 5
    assert_same(*([end[-1] for end in ends] if explored else ends))


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_what_it_was_bit_for_bit(name: str, assert_same: Any) -> None:
    ends, search = both(LOOPS[name], adamw)
    assert_same(*ends)
    assert len(search.history) >= 4
    assert all(record.estimates["learning_rate"]["stderr"] > 0 for record in search.history)


def test_a_first_pass_with_borrowed_parameters_takes_no_point_of_them() -> None:
    """Of two micro-batches the first is by `torch.func`, at other weights. Nor are frozen parameters copied for it."""
    model = network()
    model[0].requires_grad_(False)  # type: ignore[index]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, micro_batches=2, guard=None, quiet=True)
    first = [p.detach().clone() for p in model.parameters()]
    others = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    grad(lambda given: loss_of(lambda x: functional_call(model, given, (x,)), batch(0)))(others)  # type: ignore[arg-type]
    search.loss(loss_of(model, batch(0, 1))).backward()
    optimizer.step()
    anchor = search.engine.cycle.anchor
    held = anchor.values(list(model.parameters()))
    assert all(torch.equal(own, before) for own, before in zip(held, first, strict=True))
    assert len(anchor._parameters) == 2


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("loop", ["plain", "gradient scaler that skips"])
def test_any_optimizer_is_what_it_was_bit_for_bit(name: str, loop: str, assert_same: Any) -> None:
    ends, search = both(plain if loop == "plain" else scaled, OPTIMIZERS[name])
    assert_same(*ends)
    assert len(search.history) >= 4


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = (
            nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)) for _ in range(2)
        )

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.own(inputs), self.other(inputs)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, schedulefree.AdamWScheduleFree])
def test_another_optimizers_loss_may_go_backward_after_the_step(kind: Any, assert_same: Any) -> None:
    """As an actor's and a critic's from one forward pass: what is put back is, to its graph, not written."""

    def losses(model: nn.Module, given: tuple[Tensor, Tensor]) -> list[Tensor]:
        return [F.cross_entropy(output, given[1]) for output in model(given[0])]

    held_out = hdet.Probe(lambda model, given: torch.stack(losses(model, given)).sum(), probe().batches)
    ends = []
    for searched in (False, True):
        torch.manual_seed(7)
        model = TwoHeads()
        own, other = kind(model.own.parameters(), lr=1e-3), torch.optim.AdamW(model.other.parameters(), lr=1e-3)
        getattr(own, "train", bool)()
        options: dict[str, Any] = {"schedule": None, "knobs": HELD[:2], "window": 5, "tail": None, "quiet": True}
        search = hdet.attach(model, own, probe=held_out, **options) if searched else None
        for step in range(20):
            first, second = losses(model, batch(step))
            told(search, first)
            for optimizer, loss in ((own, first), (other, second)):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        ends.append([model.state_dict(), own.state_dict(), other.state_dict()])
        assert search is None or len(search.history) == 4
    assert_same(*ends)


@pytest.mark.parametrize("what", ["model", "in place", "step", "both"])
def test_compiled_it_is_what_it_was_bit_for_bit(what: str, assert_same: Any) -> None:
    """The hooks break graphs and are never traced."""
    ends = []
    for searched in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(7)
        model: Any = network()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.05))
        called = torch.compile(model, backend="aot_eager") if what in ("model", "both") else model
        if what == "in place":
            model.compile(backend="aot_eager")
        search = None
        if searched:
            search = hdet.attach(
                called,
                optimizer,
                probe=probe(),
                schedule=None,
                knobs=HELD[:2],
                exclude=["dropout"],
                window=5,
                tail=None,
                quiet=True,
            )
        step = torch.compile(optimizer.step, backend="aot_eager") if what in ("step", "both") else optimizer.step
        for number in range(20):
            told(search, loss_of(called, batch(number))).backward()
            step()
            optimizer.zero_grad()
        ends.append(copy.deepcopy(model.state_dict()))
        if search is not None:
            assert search.engine.step_count == 20
    assert_same(*ends)


@pytest.mark.parametrize("closure", [False, True])
def test_of_a_compiled_step_nothing_of_hdet_is_traced(closure: bool) -> None:
    """Forward, loss, backward and update in one compiled function: graphs are of what the user wrote."""
    traced: set[str] = set()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        traced.update(node.stack_trace or "" for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.05))
    held_out = hdet.Probe(lambda model, given: model(given).square().mean(), [torch.randn(4, 8) for _ in range(2)])
    search = hdet.attach(model, optimizer, probe=held_out, total_steps=6, window=3, micro_batches=1, quiet=True)

    def backward() -> Tensor:
        optimizer.zero_grad()
        loss = search.loss(model(torch.ones(4, 8)).square().mean())
        loss.backward()
        return loss

    @torch.compile(backend=backend)
    def step() -> None:
        if closure:
            optimizer.step(backward)
        else:
            backward()
            optimizer.step()

    for _ in range(6):
        step()
    assert search.finished
    assert traced
    assert not [trace for trace in traced if str(Path(hdet.__file__).parent) in trace]


def test_under_compiled_autograd_each_micro_batch_is_a_pass(assert_same: Any) -> None:
    """Such a backward calls nothing back when it is through."""
    ends = []
    for backward in (nullcontext, lambda: compiled_autograd._enable(torch.compile(backend="eager"))):
        torch._dynamo.reset()
        torch.manual_seed(7)
        model = network()
        optimizer = adamw(model)
        search = hdet.attach(model, optimizer, probe=probe(), schedule=None, window=5, quiet=True)
        for step in range(15):
            for part in range(2):
                loss = told(search, loss_of(model, batch(step, part)))
                with backward():
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert search.engine.size == 2
        ends.append(copy.deepcopy([model.state_dict(), [record.estimates for record in search.history]]))
    assert "dropout" in search.shifts
    assert_same(*ends)


def test_a_graph_that_is_to_hold_a_hook_is_told_what_to_compile() -> None:
    torch._dynamo.reset()
    model = network()
    hdet.attach(model, adamw(model), probe=probe(), schedule=None, quiet=True)
    whole = torch.compile(lambda inputs: model(inputs).sum(), backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile the model alone"):
        whole(batch(0)[0])
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"call search\.detach\(\) first"):
        torch.export.export(model, (batch(0)[0],), strict=True)


def test_a_compiled_model_in_a_compiled_function_is_told_to_attach_to_the_plain_one() -> None:
    """Torch calls what is inside such a model, and not its hooks."""
    torch._dynamo.reset()
    model = network()
    hdet.nn.swap(model)
    optimizer, compiled = adamw(model), torch.compile(model, backend="eager")
    hdet.attach(compiled, optimizer, probe=probe(), schedule=None, micro_batches=1, quiet=True)
    torch.compile(lambda inputs: compiled(inputs).sum(), backend="eager")(batch(0)[0]).backward()
    with pytest.raises(StepError, match=r"to the model before torch\.compile"):
        optimizer.step()


@pytest.mark.parametrize("kind", ["dict", "tuple", "itself"])
def test_a_loss_that_the_model_returns_is_found(kind: str) -> None:
    model = Returning(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    held_out = hdet.Probe(lambda model, given: F.cross_entropy(model(given[0]), given[1]), probe().batches)
    search = hdet.attach(model, optimizer, probe=held_out, total_steps=10, window=5, quiet=True)
    losses = []
    for step in range(10):
        found = model(*batch(step))
        loss = found["loss"] if kind == "dict" else found[1] if kind == "tuple" else found
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [record.loss for record in search.history] == [
        pytest.approx(sum(losses[start : start + 5]) / 5) for start in (0, 5)
    ]


def test_a_short_accumulation_teaches_nothing_and_is_no_fault() -> None:
    _, search = both(ragged, adamw)
    assert search.engine.size == 4
    assert not any(record.faults for record in search.history)


def test_tensor_rates_are_moved_in_place() -> None:
    model = network()
    rate = torch.tensor(1e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
    held = optimizer.param_groups[0]["lr"]
    inside: list[float] = []
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, window=5, quiet=True)
    optimizer.register_step_pre_hook(lambda optimizer, *_: inside.append(float(optimizer.param_groups[0]["lr"])))
    plain(model, optimizer, search)
    assert optimizer.param_groups[0]["lr"] is held
    assert float(held) == pytest.approx(1e-3)
    assert len({round(value, 9) for value in inside}) > 10


def test_a_scheduler_that_is_stepped_every_epoch_is_followed() -> None:
    model = network()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    search = attached(model, optimizer, scheduler=scheduler, scheduler_every=5)
    for step in range(STEPS):
        told(search, loss_of(model, batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            scheduler.step()
    assert search.finished
    knob = search.engine.knobs[0]
    assert knob.schedule(STEPS - 1) == pytest.approx(3e-3 * 0.5**3)


@pytest.mark.parametrize("jump", [13, 14, 15])
def test_a_rate_written_in_a_windows_last_step_is_the_next_steps_too(jump: int) -> None:
    """Held still, a rate that is only followed is what the loop wrote, in every step; windows have five."""
    in_force: list[float] = []
    model = network()
    optimizer = adamw(model)
    search = attached(model, optimizer, schedule=None, knobs=HELD, total_steps=None)
    optimizer.register_step_pre_hook(lambda own, *_: in_force.append(float(own.param_groups[0]["lr"])))
    for step in range(20):
        if step == jump:
            optimizer.param_groups[0]["lr"] *= 10
        told(search, loss_of(model, batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert in_force == pytest.approx([3e-3] * jump + [3e-2] * (20 - jump), rel=1e-12)


@pytest.mark.parametrize("known", [True, False])
def test_a_warm_up_that_is_stepped_every_epoch_is_seen_within_an_epoch(known: bool) -> None:
    """What comes is looked ahead at where it is known; where it is not, what was raised before is taken back."""
    model = network()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.1 if epoch < 2 else 1.0)
    knobs = [hdet.LearningRate(initial_shift=1.0), hdet.WeightDecay(controller=Hold())]
    following: dict[str, Any] = {"scheduler": scheduler, "scheduler_every": 10} if known else {"schedule": None}
    search = attached(model, optimizer, knobs=knobs, exclude=["dropout"], warmup_steps=0, **following)
    for step in range(STEPS):
        told(search, loss_of(model, batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            scheduler.step()
    records = list(search.history)
    seen = [record.estimates["learning_rate"]["offset"] for record in records[:4]]
    assert seen == pytest.approx(4 * [math.log(2.5) if known else 0.0])
    rules = [record.reasons.get("learning_rate", {}).get("rule") for record in records]
    moves = [record.moves["learning_rate"] for record in records]
    assert (rules[:4] == 4 * ["look_ahead"]) == known
    assert (rules[4] == "await_schedule") != known
    if not known:
        assert moves[4] == pytest.approx(-min(1.0 + sum(moves[:4]), math.log(10.0)))


class Handed(torch.optim.SGD):
    """It is handed the loss where others take a closure, as rules for the size of a step are."""

    def step(self, loss: Any) -> None:
        assert isinstance(loss, Tensor)
        super().step()


def test_what_a_step_takes_in_place_of_a_closure_is_handed_on() -> None:
    model = network()
    optimizer = Handed(model.parameters(), lr=0.1)
    search = attached(model, optimizer)
    for step in range(STEPS):
        loss = told(search, loss_of(model, batch(step)))
        loss.backward()
        optimizer.step(loss)
        optimizer.zero_grad()
    assert search.finished


def test_beside_a_scheduler_training_may_go_on_at_what_was_learned() -> None:
    model = network()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    search = attached(model, optimizer, scheduler=scheduler)
    plain(model, optimizer, search)
    assert search.finished
    inside: list[float] = []
    optimizer.register_step_pre_hook(lambda optimizer, *_: inside.append(optimizer.param_groups[0]["lr"]))
    plain(model, optimizer, search)
    assert inside[-1] == pytest.approx(search.shifts["learning_rate"].value)
    assert optimizer.param_groups[0]["lr"] == 3e-3


def test_a_notebooks_cell_may_run_twice() -> None:
    model = network()
    optimizer = adamw(model)
    first = attached(model, optimizer)
    plain(model, optimizer, first)
    second = attached(model, optimizer)
    assert not first.attached
    assert second.shifts["learning_rate"].start == 3e-3
    assert len(model._forward_pre_hooks) == 1
