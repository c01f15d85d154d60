"""The last converged point: taken, held apart from the model, put back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.errors import StepError
from hdet.replicas.anchor import Anchor


@pytest.fixture
def pair(problem: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = problem.model(nn.BatchNorm1d(6))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(problem: Any, model: nn.Module, optimizer: Any, number: int) -> None:
    problem.loss(model, problem.batch(number, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("device", [None, "cpu"])
def test_restoring_brings_back_parameters_buffers_and_optimizer(
    device: Any, pair: Any, problem: Any, assert_same: Any
) -> None:
    model, optimizer = pair
    anchor = Anchor(model, optimizer, device)
    for number in range(2):  # the second time into memory it has
        step(problem, model, optimizer, number)
        anchor.take(number + 1)
    want = anchor.state_dict()
    assert want["step"] == 2
    for number in range(2, 5):
        step(problem, model, optimizer, number)
    assert model[2].num_batches_tracked == 5
    assert_same(anchor.state_dict(), want)
    anchor.restore(model, optimizer)
    assert_same(model.state_dict(), want["model"])
    assert_same(optimizer.state_dict(), want["optimizer"])
    step(problem, model, optimizer, 5)
    assert_same(anchor.state_dict(), want)


def test_a_model_that_is_made_wider_is_held_as_wide(pair: Any, assert_same: Any) -> None:
    model, optimizer = pair
    anchor = Anchor(model, optimizer)
    anchor.take(0)
    model.double()
    with torch.no_grad():
        model[0].weight.fill_(0.1)
    want = copy.deepcopy(model.state_dict())
    anchor.take(1)
    anchor.restore(model, optimizer)
    assert_same(model.state_dict(), want)


def test_asking_for_its_state_leaves_the_model_as_it_is(pair: Any, problem: Any, assert_same: Any) -> None:
    model, optimizer = pair
    anchor = Anchor(model, optimizer)
    anchor.take(0)
    step(problem, model, optimizer, 0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = anchor.state_dict()
    assert_same(model.state_dict(), before)
    assert not torch.equal(state["model"]["0.weight"], model[0].weight)


def test_its_values_are_in_the_order_of_the_parameters_asked_for(pair: Any) -> None:
    model, optimizer = pair
    model.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    anchor = Anchor(model, optimizer)
    anchor.take(0)
    live = [p for p in model.parameters() if p.numel()]
    held = anchor.values(live)
    assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in zip(held, live, strict=True))


def test_a_tensor_rate_is_held_by_value_and_stays_as_it_was_written_since(problem: Any) -> None:
    model = problem.model()
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    anchor = Anchor(model, optimizer)
    anchor.take(0)
    optimizer.param_groups[0]["lr"].fill_(0.5)
    anchor.restore(model, optimizer)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5
    assert anchor.state_dict()["optimizer"]["param_groups"][0]["lr"].item() == pytest.approx(0.1)


def test_restoring_keeps_every_tensor_the_object_that_it_was(pair: Any, problem: Any) -> None:
    """A captured graph, and whoever holds a reference, goes on seeing the state in force."""
    model, optimizer = pair
    step(problem, model, optimizer, 0)
    anchor = Anchor(model, optimizer)
    anchor.take(1)
    live = [*model.parameters(), *model.buffers(), *(t for own in optimizer.state.values() for t in own.values())]
    group = optimizer.param_groups[0]
    step(problem, model, optimizer, 1)
    anchor.restore(model, optimizer)
    after = [*model.parameters(), *model.buffers(), *(t for own in optimizer.state.values() for t in own.values())]
    assert all(one is other for one, other in zip(live, after, strict=True))
    assert optimizer.param_groups[0] is group


def test_copies_lie_in_the_same_memory_window_after_window(pair: Any, problem: Any) -> None:
    model, optimizer = pair
    anchor = Anchor(model, optimizer)
    held: list[list[int]] = []
    for number in range(3):
        step(problem, model, optimizer, number)
        anchor.take(number + 1)
        moments = [own["exp_avg"] for own in anchor.optimizer_state()["state"].values()]
        held.append([t.data_ptr() for t in (*anchor.held, *moments)])
    assert held[0] == held[1] == held[2]


def test_frozen_parameters_are_not_copied_unless_somebody_writes_them(problem: Any) -> None:
    """A LoRA base is not; a teacher that follows by moving averages is, from the first time it was seen to move."""
    model = nn.ModuleDict({"base": nn.Linear(4, 6), "teacher": nn.Linear(6, 6), "adapter": nn.Linear(6, 1)})
    model["base"].requires_grad_(False)
    model["teacher"].requires_grad_(False)
    optimizer = torch.optim.SGD(model["adapter"].parameters(), lr=0.1)
    anchor = Anchor(model, optimizer)
    anchor.take(0)
    live = {p.data_ptr() for p in model.parameters()}
    assert [t.data_ptr() in live for t in anchor.values(list(model.parameters()))] == [True] * 4 + [False] * 2
    with torch.no_grad():
        model["teacher"].weight.mul_(0.5)
    anchor.take(1)
    before = model["teacher"].weight.clone()
    with torch.no_grad():
        model["teacher"].weight.fill_(float("nan"))
    anchor.restore(model, optimizer)
    assert torch.equal(model["teacher"].weight, before)
    (base, *_) = anchor.values([model["base"].weight])
    assert base.data_ptr() == model["base"].weight.data_ptr()


def test_weights_that_a_checkpoint_brings_are_not_taken_for_written() -> None:
    """Else a run that is resumed beside LoRA adapters holds its base twice."""

    def made() -> tuple[nn.Module, hdet.Engine]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6).requires_grad_(False), nn.Linear(6, 1))
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        probe = hdet.Probe(lambda model, x: model(x).square().mean(1), [torch.randn(4, 4)] * 2)
        home = hdet.micro_batches(model, optimizer, 1)
        knobs = [hdet.LearningRate(evidence=hdet.evidence.Line())]
        return model, hdet.Engine(home, knobs, window=3, total_steps=20, signal=probe, guard=hdet.Rewind())

    def train(engine: hdet.Engine, steps: int) -> None:
        for _ in range(steps):
            (replica,) = engine.replicas
            with replica:
                loss = replica.model(torch.randn(4, 4)).square().mean()
                loss.backward()
            engine.optimizers[0].step()
            engine.optimizers[0].zero_grad()
            engine.step([loss])

    model, engine = made()
    model.load_state_dict(model.state_dict())  # after the engine was made
    train(engine, 4)
    state = engine.state_dict()
    other, resumed = made()
    resumed.load_state_dict(state)
    train(resumed, 8)
    for held, of in ((engine, model), (resumed, other)):
        own = {parameter.data_ptr() for parameter in of[0].parameters()}
        assert held.cycle.watch.points
        for anchor in (held.cycle.anchor, *held.cycle.watch.points):
            assert {value.data_ptr() for value in anchor.values(list(of[0].parameters()))} == own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_teacher_that_is_written_through_data_is_held_from_the_first_steps_on(dtype: torch.dtype) -> None:
    """As those of MoCo, BYOL and DINO, which leaves no mark on the tensor; a norm in half precision hardly changes."""
    model = nn.ModuleDict({"teacher": nn.Linear(6, 6), "student": nn.Linear(6, 6)}).to(dtype)
    model["teacher"].requires_grad_(False)
    anchor = Anchor(model, torch.optim.SGD(model["student"].parameters(), lr=0.1))
    anchor.take(0)
    anchor.take(0)
    with torch.no_grad():
        model["teacher"].weight.data[0, 0].mul_(1.1)
    anchor.take(5)
    before = model["teacher"].weight.clone()
    model["teacher"].weight.data.fill_(float("nan"))
    anchor.restore(model, torch.optim.SGD(model["student"].parameters(), lr=0.1))
    assert torch.equal(model["teacher"].weight, before)
    own = anchor.values([model["teacher"].bias])[0]
    assert own.data_ptr() == model["teacher"].bias.data_ptr(), "of what stood still there is no copy"


def test_a_buffer_that_came_or_grew_since_is_let_be(problem: Any) -> None:
    model = problem.model()
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    anchor = Anchor(model, optimizer)
    anchor.take(0)
    model.register_buffer("late", torch.ones(1))
    model.cache = torch.ones(5)
    with torch.no_grad():
        model[0].weight.zero_()
    anchor.restore(model, optimizer)
    assert torch.equal(model.late, torch.ones(1))
    assert torch.equal(model.cache, torch.ones(5))
    assert model[0].weight.abs().sum() > 0


@pytest.mark.parametrize("goes", [False, True])
def test_layers_that_come_or_go_in_front_leave_each_of_the_others_its_own(goes: bool) -> None:
    layers = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(3)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model[1:].parameters(), lr=0.1)
    anchor = Anchor(model, optimizer)
    anchor.take(0)
    kept = [tensor.clone() for layer in layers[1:] for tensor in layer.state_dict().values()]
    if goes:
        del model[0]
    else:
        model.insert(0, nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    came = {name: tensor.clone() for name, tensor in model[0].state_dict().items()} if not goes else {}
    with torch.no_grad():
        for layer in layers[1:]:
            for tensor in layer.state_dict().values():
                tensor.fill_(7)
    own = list(layers[2].parameters())
    assert all(torch.equal(*pair) for pair in zip(anchor.values(own), kept[7:11], strict=True))
    anchor.restore(model, optimizer)
    now = [tensor for layer in layers[1:] for tensor in layer.state_dict().values()]
    assert all(torch.equal(*pair) for pair in zip(now, kept, strict=True))
    assert all(torch.equal(model[0].state_dict()[name], tensor) for name, tensor in came.items())


def test_what_was_replaced_has_its_place(problem: Any) -> None:
    """As by `load_state_dict(assign=True)`, or a BatchNorm made anew."""
    model = problem.model(nn.BatchNorm1d(6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    anchor = Anchor(model, optimizer)
    anchor.take(0)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict({name: torch.full_like(value, 7) for name, value in kept.items()}, assign=True)
    model[2] = nn.BatchNorm1d(6)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    anchor.restore(model, optimizer)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())


def test_a_copy_in_which_layers_have_come_is_refused() -> None:
    models = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    anchor = Anchor(models[0], optimizers[0])
    anchor.take(0)
    models[1].insert(0, nn.Linear(2, 2))
    with pytest.raises(StepError, match="a copy of the model has 6 parameters, and had 4 at step 0"):
        anchor.restore(models[1], optimizers[1])


def test_a_scripted_part_is_held_with_its_buffers() -> None:
    model = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.BatchNorm1d(3)))
    anchor = Anchor(model, torch.optim.SGD(model.parameters(), lr=0.1))
    anchor.take(0)
    model(torch.randn(4, 3))
    anchor.take(1)
    kept = model[1].running_mean.clone()
    model(torch.randn(4, 3))
    anchor.restore(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.equal(model[1].running_mean, kept)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_the_host_it_takes_no_device_memory(problem: Any) -> None:
    model = nn.Linear(1000, 1000, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1000, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = torch.cuda.memory_allocated()
    anchor = Anchor(model, optimizer, "cpu")
    anchor.take(0)
    assert torch.cuda.memory_allocated() == before
    anchor.restore(model, optimizer)
    assert optimizer.state[model.weight]["exp_avg"].is_cuda
