"""One graph for any number of values, with what a plain module does as the control."""

import copy
import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.nn import functional as F

from hdet.nn import (
    CrossEntropyLoss,
    Dropout,
    KnobTensor,
    MultiheadAttention,
    Temperature,
    attention,
    knob_tensors,
    swap,
)

WIDTH, HEADS, VALUES = 8, 2, 24


class Attention(nn.Module):
    """Attention as models write it themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)


class Model(nn.Module):
    """Every knob at once."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)
        self.own = Attention()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=True)
        self.channels = nn.Dropout1d(0.1)
        self.temperature = Temperature()
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = x + self.own(self.dropout(x))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.loss(self.temperature(self.channels(x)).transpose(1, 2), target)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, 5, WIDTH), torch.randint(WIDTH, (3, 5))


def explored() -> Model:
    torch.manual_seed(0)
    model = Model()
    swap(model)
    swap(model, pattern="own")
    return model


def all_knobs(model: nn.Module) -> list[KnobTensor]:
    knobs = [
        *knob_tensors(model, "dropout").values(),
        *knob_tensors(model, "temperature").values(),
        *knob_tensors(model, "label_smoothing").values(),
    ]
    assert len(knobs) == 7
    return knobs


@pytest.fixture
def strict() -> Iterator[None]:
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


@pytest.mark.usefixtures("strict")
def test_a_whole_model_has_one_graph() -> None:
    model = explored()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for step in range(VALUES):
        for index, knob in enumerate(all_knobs(model)):
            knob.fill_(0.05 + (step * 7 + index) % 31 / 40)
        compiled(*batch()).backward()
    assert counter.frame_count == 1


def test_plain_modules_recompile_so_the_test_can_fail() -> None:
    model = nn.Dropout(0.1)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    for step in range(4):
        model.p = 0.1 + step / 10
        compiled(torch.ones(3))
    assert counter.frame_count > 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.usefixtures("strict")
@torch._inductor.config.patch({"cpp.vec_isa_ok": True})  # trying out the processor's instructions takes 7 s
def test_inductor_computes_each_value_with_one_graph() -> None:
    """Temperature and smoothing against eager; dropout by what it keeps."""
    temperature, smoothed, drop = Temperature(), CrossEntropyLoss(label_smoothing=0.5), Dropout(0.5)

    def run(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return smoothed(temperature(x), target), drop(torch.ones(4000))

    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(run, backend=counter, fullgraph=True)
    x, target = batch()
    for step in range(VALUES):
        temperature.temperature = 0.2 + step / 5
        smoothed.label_smoothing = 0.02 + step / 40
        drop.p = p = 0.02 + step / 30
        gradients = []
        for function in (compiled, run):
            leaf = x[:, 0].clone().requires_grad_()
            loss, kept = function(leaf, target[:, 0])
            loss.backward()
            gradients.append((loss.detach(), leaf.grad))
            assert abs((kept == 0).float().mean().item() - p) < 5 * (p * (1 - p) / 4000) ** 0.5
            torch.testing.assert_close(kept.max(), torch.tensor(1 / (1 - p)))
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.usefixtures("strict")
def test_the_attention_function_has_one_graph() -> None:
    counter = CompileCounter()
    temperature, dropout = KnobTensor(1.0), KnobTensor(0.1)
    compiled = torch.compile(attention, backend=counter, fullgraph=True)
    q = torch.randn(1, HEADS, 5, WIDTH)
    for step in range(VALUES):
        temperature.fill_(0.5 + step / 10)
        dropout.fill_(step / 50)
        compiled(q, q, q, temperature=temperature, dropout=dropout)
    assert counter.frame_count == 1


@pytest.mark.usefixtures("strict")
def test_evaluation_of_an_encoder_has_one_graph() -> None:
    model = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True).eval()
    swap(model)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    with torch.no_grad():
        for step in range(VALUES):
            model.self_attn.temperature = 0.5 + step / 10
            compiled(torch.randn(2, 4, WIDTH))
    assert counter.frame_count == 1


@pytest.mark.usefixtures("strict")
def test_replicas_share_a_graph() -> None:
    """Copies of one model in one process: more of them than recompilations are allowed."""
    model = explored()
    counter = CompileCounter()
    replicas = [copy.deepcopy(model) for _ in range(10)]
    for index, replica in enumerate(replicas):
        for knob in all_knobs(replica):
            knob.fill_(0.05 + index / 20)
        replica.compile(backend=counter, fullgraph=True)
        replica(*batch()).backward()
    assert counter.frame_count == 1


@pytest.mark.parametrize("module", [Dropout(0.0), MultiheadAttention(WIDTH, HEADS), CrossEntropyLoss()])
def test_leaving_zero_recompiles_once_at_most(module: nn.Module) -> None:
    """A dropout or smoothing never used costs nothing in the graph; using it costs one compilation."""
    x, target = batch()
    arguments = {Dropout: (x,), MultiheadAttention: (x, x, x), CrossEntropyLoss: (x[0], target[0])}
    counter = CompileCounter()
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    knob = next(
        knob for name, knob in vars(module).items() if name in {"p_knob", "dropout_knob", "label_smoothing_knob"}
    )
    for step in range(6):
        knob.fill_(step / 10)
        compiled(*arguments[type(module)])
        assert counter.frame_count == min(step + 1, 2)
    knob.fill_(0.0)
    compiled(*arguments[type(module)])
    assert counter.frame_count == 2


def test_a_value_written_before_its_backward_is_an_error_not_a_wrong_gradient() -> None:
    model = Temperature(2.0)
    compiled = torch.compile(lambda x: model(x).exp(), backend="aot_eager")
    y = compiled(torch.ones(2, requires_grad=True))
    model.temperature = 3.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
