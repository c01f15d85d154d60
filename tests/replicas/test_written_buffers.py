"""Buffers that a model's evaluation writes are after it what they were before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import schedulefree
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize, MovingAverageMinMaxObserver
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from hdet.replicas import tensors, written_buffers


class Stateful(nn.Module):
    """It keeps a running mean in a buffer, and counts its passes in an attribute."""

    def __init__(self, write: Callable[[Stateful, Tensor], object], state: Tensor | None) -> None:
        super().__init__()
        self.write = write
        self.passes = 0
        self.register_buffer("state", state)
        self.register_buffer("mask", torch.ones(3))

    def forward(self, inputs: Tensor) -> Tensor:
        self.write(self, inputs.detach().mean(0))
        self.passes += 1
        return inputs - self.state


def rebind(model: Stateful, mean: Tensor) -> None:
    model.state = mean if model.state is None else model.state * 0.5 + mean


def grow(model: Stateful, mean: Tensor) -> None:
    model.state.resize_(mean.shape).copy_(mean)


WRITES: dict[str, tuple[Callable[[Stateful, Tensor], object], Tensor | None]] = {
    "in place": (lambda model, mean: model.state.lerp_(mean, 0.1), torch.zeros(3)),
    "copied": (lambda model, mean: model.state.copy_(mean), torch.zeros(3)),
    "by index": (lambda model, mean: model.state.index_fill_(0, torch.tensor([1]), 2.0), torch.zeros(3)),
    "rebound": (rebind, torch.zeros(3)),
    "first made": (rebind, None),
    "resized": (grow, torch.zeros(0)),
}


def states(model: nn.Module) -> list[Any]:
    return [
        None if buffer is None else (id(buffer), buffer.tolist())
        for module in model.modules()
        for buffer in module._buffers.values()
    ]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", WRITES)
@torch.no_grad()
def test_what_evaluation_writes_is_undone(name: str, compiled: bool) -> None:
    """In the first evaluation and in later ones, and what the training writes in between stays."""
    write, state = WRITES[name]
    model = Stateful(write, None if state is None else state.clone())
    called = torch.compile(model, backend="aot_eager") if compiled and name != "resized" else model
    for step in range(3):
        before, passes = states(model), model.passes
        with tensors.evaluating(called if step < 2 else nn.Sequential(called)):
            called(torch.randn(4, 3))
            called(torch.randn(4, 3))
            assert states(model) != before
        assert (states(model), model.passes) == (before, passes)
        called(torch.randn(4, 3))
        assert (states(model) != before, model.passes) == (True, passes + 1)
        if name == "by index":
            model.state.zero_()


def test_modules_that_share_a_buffer_are_each_put_back() -> None:
    shared = torch.zeros(3)
    model = nn.Sequential(*(Stateful(lambda own, mean: own.state.add_(1.0), shared) for _ in range(2)))
    for _ in range(3):
        with tensors.evaluating(model):
            model(torch.randn(4, 3))
        assert ([own.passes for own in model], shared.tolist()) == ([0, 0], [0.0] * 3)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["state", "whole"])
def test_a_graph_is_told_of_a_write_that_is_not_put_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large buffer's first, though a part of it is a buffer that is put back. Of others it need not know."""
    monkeypatch.setattr(written_buffers, "LARGE", 12)
    model = Stateful(lambda own, mean: getattr(own, name).add_(1.0), torch.zeros(3))
    model.register_buffer("whole", torch.zeros(6))
    model.mask = model.whole[:3]
    weight = torch.ones(len(getattr(model, name)), requires_grad=True)
    loss = (weight * getattr(model, name)).sum()
    with tensors.evaluating(model), torch.no_grad():
        model(torch.randn(4, 3))
    if name == "state":
        loss.backward()
        assert weight.grad.tolist() == [0.0] * 3
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_what_quantization_aware_training_observes_is_undone() -> None:
    """Torch counts no write of its fused observer, which observes in eval mode too."""
    model = nn.Sequential(FusedMovingAvgObsFakeQuantize(MovingAverageMinMaxObserver, 0, 127, reduce_range=False))
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(4, 3))
            before = states(model)
            with tensors.evaluating(model):
                model(10.0 * torch.randn(4, 3))
                assert states(model) != before
            assert states(model) == before


class Following(nn.BatchNorm1d):
    """A norm that counts no batches."""

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.batch_norm(inputs, self.running_mean, self.running_var, training=self.training)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(3), nn.InstanceNorm1d(4, track_running_stats=True), Following(3)])
@torch.no_grad()
def test_what_a_norm_in_train_mode_follows_is_undone(norm: nn.Module) -> None:
    """As where a model returns its losses in train mode alone. Torch counts no write of its kernels."""
    model = nn.Sequential(nn.Linear(3, 3), norm)
    for _ in range(3):
        model(torch.randn(4, 3))
        before = states(model)
        with tensors.evaluating(model):
            model.train()
            model(10.0 * torch.randn(4, 3))
            assert states(model)[0] != before[0]
        assert states(model) == before


@torch.no_grad()
def test_what_an_evaluation_is_known_to_write_is_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """To compare waits for the device."""
    model = Following(3)
    for evaluation in range(2):
        before = states(model)
        with tensors.evaluating(model):
            model.train()
            model(torch.randn(4, 3))
        assert states(model) == before, evaluation
        monkeypatch.setattr(written_buffers, "_differs", lambda *_: pytest.fail("it was compared"))


@torch.no_grad()
def test_a_buffer_that_is_not_a_number_is_no_written_one() -> None:
    model = Stateful(lambda model, mean: None, torch.full((3,), torch.nan))
    for _ in range(2):
        with tensors.evaluating(model):
            model(torch.randn(4, 3))
    assert model.passes == 2, "attributes go back with what was written alone"


def test_it_is_undone_after_an_error() -> None:
    model = Stateful(*WRITES["in place"])
    before = states(model)

    def fail() -> None:
        with tensors.evaluating(model):
            model(torch.randn(4, 3))
            raise ValueError

    for _ in range(2):
        with pytest.raises(ValueError):
            fail()
        assert states(model) == before


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_rows_that_a_lookup_scales_down_come_back(kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind(4, 3, max_norm=0.1))
    before = model[0].weight.detach().clone()
    with tensors.evaluating(model):
        model(torch.tensor([[0, 1]]))
        assert not torch.equal(model[0].weight, before)
    assert torch.equal(model[0].weight, before)
    model(torch.tensor([[2]]))  # training's own lookups scale theirs
    changed = (model[0].weight != before).any(dim=1)
    assert changed.tolist() == [False, False, True, False]


class Caching(nn.Module):
    """Its forward pass looks rows up and notes that it has, which no mode takes back."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, 3, max_norm=0.1)
        self.cached = False

    def forward(self, inputs: Tensor) -> Tensor:
        self.cached = True
        return self.rows(inputs)  # type: ignore[no-any-return]


def test_rows_that_a_lookup_scales_down_are_no_weights_folded_for_evaluation() -> None:
    model = nn.Sequential(Caching())
    before = model[0].rows.weight._version
    folding = written_buffers.Folding(model)
    model(torch.tensor([0]))
    assert model[0].rows.weight._version > before
    assert folding.found() is None


def copied(model: nn.Module) -> set[str]:
    """The buffers that the next evaluation copies."""
    return {name for module in model.modules() if module._buffers for name in written_buffers._Held(module)._values}


def test_only_what_was_written_is_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a BatchNorm, and a large buffer once it has been written."""
    model = nn.Sequential(nn.BatchNorm1d(3), Stateful(*WRITES["in place"]))
    assert copied(model) == {"running_mean", "running_var", "num_batches_tracked", "state", "mask"}
    with tensors.evaluating(model):
        model(torch.randn(4, 3))
    assert copied(model) == {"state"}
    monkeypatch.setattr(written_buffers, "LARGE", 8)
    large = Stateful(*WRITES["in place"])
    assert copied(large) == set()
    with tensors.evaluating(large):
        large(torch.randn(4, 3))
    before = states(large)
    with tensors.evaluating(large):
        large(torch.randn(4, 3))
    assert states(large) == before


def test_a_sharded_buffer_is_put_back() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        state = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (1,)), [Shard(0)])
        writes = (lambda model, mean: model.state.add_(1.0), lambda model, mean: model.state.to_local().add_(1.0))
        for write in writes:
            model = Stateful(write, state)
            for _ in range(2):
                with tensors.evaluating(model):
                    model.write(model, torch.zeros(4))
                    assert model.state.to_local().tolist() == [1.0, 2.0, 3.0, 4.0]
                assert model.state is state
                assert isinstance(state, DTensor)
                assert state.to_local().tolist() == [0.0, 1.0, 2.0, 3.0]
    finally:
        dist.destroy_process_group()


class Taught(nn.Module):
    """Its forward pass moves a frozen teacher towards the student."""

    def __init__(self, move: Callable[[nn.Parameter, Tensor], object]) -> None:
        super().__init__()
        self.move = move
        self.student = nn.Linear(3, 2)
        self.teacher = nn.Linear(3, 2).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            for own, mean in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                self.move(mean, own)
        return self.student(inputs) - self.teacher(inputs)


def give_data(teacher: nn.Parameter, student: Tensor) -> None:
    teacher.data = teacher.data * 0.5 + student * 0.5


@pytest.mark.parametrize(
    ("move", "undone"),
    [(give_data, [True, True]), (lambda teacher, student: teacher.lerp_(student, 0.5), [False, True])],
    ids=["other data", "in place"],
)
def test_a_teacher_that_a_forward_pass_moves_is_put_back(move: Callable[..., object], undone: list[bool]) -> None:
    """In place the first evaluation is what tells that it is written."""
    model = Taught(move)
    for expected in undone:
        before = [(id(own), own.data_ptr(), own.tolist()) for own in model.teacher.parameters()]
        with tensors.evaluating(model):
            model(torch.ones(1, 3))
        after = [(id(own), own.data_ptr(), own.tolist()) for own in model.teacher.parameters()]
        assert (after == before) is expected


def test_what_an_evaluation_puts_back_itself_is_no_write_of_the_models() -> None:
    """Else a frozen model would be copied in each evaluation, twice."""
    model = nn.Sequential(nn.Embedding(4, 3, max_norm=0.5), nn.Linear(3, 3), nn.Linear(3, 2))
    model[:2].requires_grad_(False)
    optimizer = schedulefree.AdamWScheduleFree(model[2].parameters())
    optimizer.train()
    with tensors.evaluating(model, optimizer):
        model(torch.arange(4))
    assert not any(written_buffers._seen_frozen.get(module) for module in model.modules())


def test_a_sparse_frozen_parameter_is_left_alone() -> None:
    model = nn.Linear(3, 2)
    model.mask = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
    with tensors.evaluating(model):
        model(torch.ones(1, 3))


class Recurrent(nn.Module):
    """Whose state goes on from batch to batch as a plain attribute, with what belongs to it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(3, 4)
        self.state: tuple[Tensor, Tensor] | None = None
        self.steps = 0
        self.past: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        state = self.cell(inputs, self.state)
        self.state = tuple(one.detach() for one in state)
        self.steps += 1
        if not self.training:
            self.seen = inputs
        self.past.append(inputs)
        found: Tensor = state[0]
        return found


def test_a_state_that_is_a_plain_attribute_is_put_back() -> None:
    model, inputs = Recurrent(), torch.ones(2, 3)
    with tensors.evaluating(model):
        model(inputs)
    assert (model.state, model.steps, hasattr(model, "seen")) == (None, 0, False)
    model(inputs)
    kept = model.state
    for _ in range(2):
        with tensors.evaluating(model):
            model(torch.zeros(2, 3))
        assert model.state is kept
        assert model.steps == 1
    with tensors.evaluating(model):
        model(torch.zeros(2, 3))
        model.state = None
    assert model.state is kept, "also where the evaluation ends with none"
    assert len(model.past) == 5, "what is in a list is not seen"


def test_beside_a_replaced_tensor_other_modules_keep_what_an_evaluation_made_of_them() -> None:
    cached = nn.Linear(3, 3)
    cached.calls = 0  # type: ignore[assignment]
    model = nn.Sequential(cached, Recurrent())
    with tensors.evaluating(model):
        model(torch.ones(2, 3))
        cached.calls += 1  # type: ignore[operator]
    assert cached.calls == 1


def test_attributes_that_an_evaluation_does_not_touch_cost_no_change() -> None:
    """Numbers alone stay what it made of them: they may be caches of what is in a list."""
    model = nn.Linear(2, 2)
    model.calls = 0  # type: ignore[assignment]
    with tensors.evaluating(model):
        model.calls += 1  # type: ignore[operator]
    assert model.calls == 1
