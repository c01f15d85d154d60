import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hdet.nn as hnn
from hdet.errors import ConfigError, MatchError
from hdet.nn import knob_tensors, swap, temper
from hdet.nn.tempered import calls_attention


class Attention(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.q = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        """Positional, keyword and other arguments of the fused attention, all kept."""
        y = F.scaled_dot_product_attention(self.q(x), x, x, None, 0.0, True)
        return gain * self.drop(y) + F.scaled_dot_product_attention(query=x, key=x, value=x, scale=0.5)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1) for _ in range(2))
        self.own = Attention()
        self.images = nn.Sequential(nn.Dropout1d(0.2), nn.Dropout2d(0.3), nn.Dropout3d(0.4))
        self.criterion = nn.CrossEntropyLoss(torch.ones(4), label_smoothing=0.1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.body:
            x = layer(x)
        return self.own(x)


DROPOUTS = [f"body.{layer}.{name}" for layer in (0, 1) for name in ("dropout", "dropout1", "dropout2")]
IMAGES = ["images.0", "images.1", "images.2"]
ATTENTIONS = ["body.0.self_attn", "body.1.self_attn"]


def test_names_what_it_swapped() -> None:
    assert sorted(swap(Model())) == sorted([*DROPOUTS, "own.drop", *IMAGES, *ATTENTIONS, "criterion"])
    assert sorted(swap(Model(), attention=False, loss=False)) == sorted([*DROPOUTS, "own.drop", *IMAGES])
    assert swap(Model(), dropout=False, loss=False) == ATTENTIONS
    assert swap(Model(), dropout=False, attention=False) == ["criterion"]
    assert swap(Model(), pattern="body.1.*") == ["body.1.self_attn", *DROPOUTS[3:]]


def test_keeps_everything_but_the_class() -> None:
    model = Model()
    model.body[1].eval()
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    state = model.state_dict()
    flags = {name: module.training for name, module in modules.items()}
    seen: list[str] = []
    modules["body.0.dropout"].register_forward_hook(lambda *_: seen.append("forward"))
    modules["own"].register_forward_pre_hook(lambda *_: seen.append("pre"))
    held_elsewhere = model.body[0].self_attn
    assert swap(model)
    assert swap(model, pattern="own") == ["own"]
    assert dict(model.named_modules()).keys() == modules.keys()
    for name, module in model.named_modules():
        assert module is modules[name]
        assert module.training == flags[name]
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert list(model.state_dict()) == list(state)
    assert isinstance(held_elsewhere, hnn.MultiheadAttention)
    model(torch.randn(3, 2, 4))
    assert seen == ["forward", "pre"]


def test_computes_the_same_until_a_knob_is_written() -> None:
    torch.manual_seed(0)
    model = Model()
    x = torch.randn(3, 2, 4)
    for training in (True, False):
        model.train(training)
        torch.manual_seed(1)
        expected = model(x)
        swapped = copy.deepcopy(model)
        swap(swapped)
        swap(swapped, pattern="own")
        torch.manual_seed(1)
        assert torch.equal(swapped(x), expected)
        for knob in knob_tensors(swapped, "temperature").values():
            knob.fill_(0.1)
        assert not torch.allclose(swapped(x), expected, atol=1e-3)


def test_carries_the_values_over() -> None:
    model = Model()
    swap(model)
    values = {name: knob.value for name, knob in knob_tensors(model, "dropout").items()}
    assert values["images.0.p"] == 0.2
    assert values["body.0.self_attn.dropout"] == 0.1
    assert model.criterion.label_smoothing == 0.1
    assert "p" not in vars(model.images[0])
    model.own.drop.p = 0.7
    assert repr(model.own.drop) == "Dropout(p=0.7, inplace=False)"


def test_copies_and_pickles_are_independent() -> None:
    model = Model()
    swap(model)
    swap(model, pattern="own")
    x = torch.randn(3, 2, 4)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for knob in knob_tensors(other, "temperature").values():
            knob.fill_(3.0)
        assert {knob.value for knob in knob_tensors(model, "temperature").values()} == {1.0}
        assert type(other.own) is type(model.own)
        assert other.eval()(x).shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_moves_with_the_model_and_keeps_float32(dtype: torch.dtype) -> None:
    model = Model()
    swap(model)
    swap(model, pattern="own")
    model.to(dtype)
    for role in ("dropout", "temperature", "label_smoothing"):
        assert all(knob.tensor.dtype == torch.float32 for knob in knob_tensors(model, role).values())
    assert model(torch.randn(3, 2, 4, dtype=dtype)).dtype == dtype


def test_is_idempotent() -> None:
    model = Model()
    swap(model)
    swap(model, pattern="own")
    model.own.temperature = 2.0
    model.own.drop.p = 0.3
    assert swap(model) == []
    assert swap(model, pattern="own*") == []
    assert (model.own.temperature, model.own.drop.p) == (2.0, 0.3)


def test_works_in_a_model_that_was_compiled_before() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    compiled(torch.ones(1, 4))
    assert swap(compiled) == ["1"]
    for step in range(5):
        model[1].p = 0.05 + step / 20
        compiled(torch.ones(1, 4))
    assert counter.frame_count == 2


def test_a_module_used_twice_stays_one() -> None:
    drop = nn.Dropout(0.1)
    model = nn.ModuleDict({"a": drop, "b": drop})
    assert swap(model) == ["a"]
    assert model["a"] is model["b"]


def test_the_root_itself() -> None:
    root = nn.Dropout(0.1)
    assert swap(root) == [""]
    assert isinstance(root, hnn.Dropout)


class OwnDropout(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def test_leaves_subclasses_alone() -> None:
    model = nn.Sequential(OwnDropout(), nn.Dropout())
    assert swap(model) == ["1"]
    assert type(model[0]) is OwnDropout


def test_refuses_what_matches_nothing() -> None:
    with pytest.raises(MatchError, match=r"no module that 'heads\.\*' names .* it names none"):
        swap(Model(), pattern="heads.*")
    with pytest.raises(MatchError, match=r"modules of the types \['Linear'\]; swappable are \['CrossEntropyLoss'"):
        swap(Model(), pattern="own.q")
    with pytest.raises(MatchError):
        swap(nn.Linear(1, 1))
    with pytest.raises(MatchError, match="'Dropout'"):
        swap(Model(), attention=False, loss=False, pattern="criterion")


def test_own_attention_is_tempered_only_when_named() -> None:
    model = Model()
    assert "own" not in swap(model)
    assert swap(model, pattern="ow?", dropout=False) == ["own"]
    assert type(model.own).__name__ == "TemperedAttention"
    assert isinstance(model.own, Attention)


def test_outermost_of_nested_attentions_is_tempered() -> None:
    class Outer(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attention()

        def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
            return super().forward(self.inner(x))

    model = nn.ModuleDict({"block": Outer()})
    assert swap(model, pattern="block*", dropout=False) == ["block"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_inside_a_tempered_module_is_refused(reentrant: bool) -> None:
    """What it runs again in backward would have no temperature, and the gradients would be wrong."""

    class Checkpointed(Attention):
        def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
            output: Tensor = checkpoint(super().forward, x, gain, use_reentrant=reentrant)
            return output

    model, x = Checkpointed(), torch.randn(2, 3, 4, requires_grad=True)
    temper(model)
    model(x).sum().backward()
    model.temperature = 2.0
    with torch.no_grad():
        model(x)
    with pytest.raises(MatchError, match=r"inside torch\.utils\.checkpoint, which in backward would run it"):
        model(x)
    whole = Attention()
    temper(whole)
    whole.temperature = 2.0
    checkpoint(whole, x, use_reentrant=reentrant).sum()


def reference(module: Attention, x: Tensor, tau: float) -> Tensor:
    def attend(q: Tensor, scale: float, causal: bool) -> Tensor:
        logits = q @ x.transpose(-2, -1) * scale / tau
        if causal:
            logits = logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        return logits.softmax(-1) @ x

    return 2.0 * attend(module.q(x), 0.5, True) + attend(x, 0.5, False)


@pytest.mark.parametrize("compiled", [True, False])
def test_tempering_divides_the_logits_of_every_call(compiled: bool) -> None:
    torch.manual_seed(0)
    module = Attention().eval().double()
    temper(module)
    run: Any = torch.compile(module, backend="eager", fullgraph=True) if compiled else module
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    for tau in (0.2, 1.0, 3.0):
        module.temperature = tau
        torch.testing.assert_close(run(x, gain=2.0), reference(module, x, tau))
        got, expected = (
            torch.autograd.grad(y.square().sum(), module.q.weight)
            for y in (run(x, gain=2.0), reference(module, x, tau))
        )
        torch.testing.assert_close(got, expected)


def test_tempering_twice_changes_nothing() -> None:
    module = Attention()
    temper(module)
    module.temperature = 2.0
    temper(module)
    assert module.temperature == 2.0
    assert type(module).__mro__.count(Attention) == 1


def test_a_temperature_without_effect_is_an_error() -> None:
    class Handwritten(nn.Module):
        fused = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fused:
                return F.scaled_dot_product_attention(x, x, x)
            return (x @ x.transpose(-2, -1)).softmax(-1) @ x

    model = nn.ModuleDict({"attention": Handwritten()})
    swap(model, pattern="attention")
    model["attention"](torch.ones(1, 2, 2))
    model["attention"].temperature = 2.0
    with pytest.raises(MatchError, match=r"TemperedHandwritten .* hdet\.nn\.Temperature"):
        model["attention"](torch.ones(1, 2, 2))


def test_two_temperatures_on_one_attention_are_refused() -> None:
    outer = nn.Sequential(nn.MultiheadAttention(4, 2))
    with pytest.raises(ConfigError, match="'0' in it"):
        temper(outer)
    inner = Attention()
    temper(inner)
    with pytest.raises(ConfigError):
        temper(nn.Sequential(inner))
    with pytest.raises(ConfigError, match="it is an attention"):
        temper(nn.MultiheadAttention(4, 2))


def fused(q: Tensor) -> Tensor:
    return (lambda: F.scaled_dot_product_attention(q, q, q))()


class Indirect(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self._inner(x)

    @staticmethod
    def _inner(x: Tensor) -> Tensor:
        return fused(x)


def test_finds_attention_in_methods_bases_and_named_functions() -> None:
    assert calls_attention(Attention)
    assert calls_attention(type("Child", (Attention,), {}))
    assert calls_attention(Indirect)
    assert not calls_attention(Model)
    assert not calls_attention(nn.Linear)
    assert not calls_attention(nn.TransformerEncoderLayer)
