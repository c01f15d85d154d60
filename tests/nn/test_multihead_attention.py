import inspect
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from hdet.errors import ConfigError
from hdet.nn import MultiheadAttention

WIDTH, HEADS, BATCH, LENGTH, SOURCE = 8, 2, 3, 4, 6

CONSTRUCTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True, "dropout": 0.3},
    {"kdim": 5, "vdim": 7},
    {"kdim": 5, "vdim": 7, "bias": False, "dropout": 0.3},
    {"dropout": 0.3},
]
SHAPES = ["batch_first", "sequence_first", "unbatched"]
MASKS = ["none", "float", "bool", "float3", "bool3", "causal"]
PADDINGS = ["none", "bool", "float"]
WEIGHTS = ["none", "average", "per_head"]


def test_its_signature_is_pytorchs_and_a_temperature() -> None:
    ours = list(inspect.signature(MultiheadAttention).parameters)
    assert ours == [*inspect.signature(nn.MultiheadAttention).parameters, "temperature"]


def pair(construction: dict[str, Any], shape: str) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    torch.manual_seed(0)
    arguments = {**construction, "batch_first": shape == "batch_first"}
    theirs = nn.MultiheadAttention(WIDTH, HEADS, **arguments)
    for name, parameter in theirs.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    ours = MultiheadAttention(WIDTH, HEADS, **arguments)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def call(
    module: nn.MultiheadAttention, shape: str, mask: str, padding: str, weights: str, *, self_attention: bool
) -> tuple[Any, ...]:
    """The module's outputs, the gradients of everything, and the generator's state afterwards."""
    torch.manual_seed(1)
    source = LENGTH if self_attention else SOURCE
    leaves = [
        torch.randn(BATCH, length, width).requires_grad_()
        for length, width in ((LENGTH, WIDTH), (source, module.kdim), (source, module.vdim))
    ]
    batch = BATCH
    if shape == "unbatched":
        leaves, batch = [leaf[0].detach().requires_grad_() for leaf in leaves], 1
    seen = [leaf.transpose(0, 1) if shape == "sequence_first" else leaf for leaf in leaves]
    if self_attention:
        seen = [seen[0]] * 3
    masks: dict[str, Tensor | None] = {
        "none": None,
        "float": torch.randn(LENGTH, source),
        "bool": torch.rand(LENGTH, source) > 0.7,
        "float3": torch.randn(batch * HEADS, LENGTH, source),
        "bool3": torch.rand(batch * HEADS, LENGTH, source) > 0.7,
        "causal": torch.ones(LENGTH, source, dtype=torch.bool).triu(1),
    }
    attn_mask = masks[mask]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask[..., 0] = False
    hidden = torch.zeros(batch, source, dtype=torch.bool)
    hidden[:, -2:] = True
    paddings = {"none": None, "bool": hidden, "float": hidden.float() * -3}
    key_padding_mask = paddings[padding]
    if shape == "unbatched" and key_padding_mask is not None:
        key_padding_mask = key_padding_mask[0]
    torch.manual_seed(2)
    out, given_weights = module(
        *seen,
        key_padding_mask=key_padding_mask,
        need_weights=weights != "none",
        attn_mask=attn_mask,
        average_attn_weights=weights == "average",
        is_causal=mask == "causal",
    )
    state = torch.get_rng_state()
    if not out.requires_grad:
        return out, given_weights, state
    target = (out * torch.arange(out.numel()).view_as(out).cos()).sum()
    if given_weights is not None:
        target = target + (given_weights * torch.arange(given_weights.numel()).view_as(given_weights).sin()).sum()
    module.zero_grad()
    target.backward()
    gradients = [leaf.grad for leaf in leaves] + [parameter.grad for parameter in module.parameters()]
    return out, given_weights, *gradients, state


def combinations(step: int) -> list[tuple[Any, ...]]:
    """Every construction and shape, each with another 1/step of the call's arguments."""
    calls = list(itertools.product(MASKS, PADDINGS, WEIGHTS))
    places = itertools.product(range(len(CONSTRUCTIONS)), SHAPES)
    return [
        (construction, shape, *arguments)
        for index, (construction, shape) in enumerate(places)
        for arguments in calls[index % step :: step]
    ]


def check(theirs: tuple[Any, ...], ours: tuple[Any, ...], *, exactly: bool) -> None:
    assert len(theirs) == len(ours)
    for expected, got in zip(theirs, ours, strict=True):
        assert (expected is None) == (got is None)
        if expected is None:
            continue
        assert expected.shape == got.shape
        if exactly:
            assert torch.equal(expected, got)
        else:
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("training", [True, False])
def test_eager_at_one_is_bitwise_pytorch(training: bool) -> None:
    for index, shape, mask, padding, weights in combinations(5):
        theirs, ours = pair(CONSTRUCTIONS[index], shape)
        for self_attention in {True, False} if "kdim" not in CONSTRUCTIONS[index] else {False}:
            expected, got = (
                call(module.train(training), shape, mask, padding, weights, self_attention=self_attention)
                for module in (theirs, ours)
            )
            check(expected, got, exactly=True)


@torch.no_grad()
def divide_query_projection(module: nn.MultiheadAttention, tau: float) -> None:
    """The plain module that must equal a tempered one."""
    if module.in_proj_weight is None:
        module.q_proj_weight /= tau
    else:
        module.in_proj_weight[:WIDTH] /= tau
    if module.in_proj_bias is not None:
        module.in_proj_bias[:WIDTH] /= tau


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("tau", [0.4, 2.5])
def test_eager_divides_the_logits(tau: float) -> None:
    for index, shape, mask, padding, weights in combinations(9):
        theirs, ours = pair(CONSTRUCTIONS[index], shape)
        divide_query_projection(theirs, tau)
        ours.temperature = tau
        assert (ours.in_proj_weight is None) == (theirs.in_proj_weight is None)
        expected, got = (
            call(module, shape, mask, padding, weights, self_attention=False)
            if "kdim" in CONSTRUCTIONS[index]
            else call(module, shape, mask, padding, weights, self_attention=True)
            for module in (theirs, ours)
        )
        # Outputs, weights and input gradients; those of the divided parameters differ by the factor tau.
        check(expected[:5], got[:5], exactly=False)
        assert torch.equal(expected[-1], got[-1])


def test_gradients_reach_the_parameters() -> None:
    """d/dW of x (W / tau)^T is that of the divided weight, divided by tau, for the query's rows only."""
    tau = 2.5
    theirs, ours = pair({}, "batch_first")
    divide_query_projection(theirs, tau)
    ours.temperature = tau
    for module in (theirs, ours):
        call(module, "batch_first", "none", "none", "none", self_attention=True)
    expected = theirs.in_proj_weight.grad.clone()
    expected[:WIDTH] /= tau
    torch.testing.assert_close(ours.in_proj_weight.grad, expected)


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("training", [True, False])
def test_the_compiled_path_agrees_with_the_eager_one(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All arguments, without waiting for the compiler; a dropout back at 0 keeps the explicit weights."""
    for index, shape, mask, padding, weights in combinations(5):
        _, module = pair(CONSTRUCTIONS[index], shape)
        module.train(training)
        module.dropout = 0.0
        module.temperature = 1.7
        arguments = (shape, mask, padding, weights)
        self_attention = "kdim" not in CONSTRUCTIONS[index] and weights != "average"
        expected = call(module, *arguments, self_attention=self_attention)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        got = call(module, *arguments, self_attention=self_attention)
        monkeypatch.undo()
        check(expected[:-1], got[:-1], exactly=False)


@pytest.mark.parametrize("construction", [0, 4, 6])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_compiled_agrees_with_eager(construction: int, weights: str) -> None:
    _, module = pair(CONSTRUCTIONS[construction], "sequence_first")
    module.dropout = 0.0
    module.temperature = 1.7
    expected = call(module, "sequence_first", "causal", "bool", weights, self_attention=False)
    module.compile(backend="aot_eager", fullgraph=True)
    got = call(module, "sequence_first", "causal", "bool", weights, self_attention=False)
    check(expected[:-1], got[:-1], exactly=False)


def test_compiled_dropout_drops_weights() -> None:
    module = MultiheadAttention(WIDTH, HEADS, batch_first=True, dropout=0.0)
    module.dropout = 0.5
    x = torch.randn(BATCH, 50, WIDTH)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.manual_seed(0)
    _, weights = compiled(x, x, x, average_attn_weights=False)
    _, plain = module.eval()(x, x, x, average_attn_weights=False)
    kept = weights != 0
    assert abs(kept.float().mean().item() - 0.5) < 0.02
    torch.testing.assert_close(weights[kept], 2 * plain[kept])
    assert torch.equal(compiled(x, x, x)[0], compiled(x, x, x)[0])


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_inference_fast_path(need_weights: bool, padded: bool) -> None:
    theirs, ours = pair({}, "batch_first")
    theirs.eval()
    ours.eval()
    x = torch.randn(BATCH, LENGTH, WIDTH)
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[1, 2:] = padded

    def run(module: nn.MultiheadAttention) -> tuple[Tensor, list[str]]:
        with torch.no_grad(), torch.profiler.profile() as profile:
            out, _ = module(x, x, x, key_padding_mask=padding, need_weights=need_weights)
        return out, [event.key for event in profile.key_averages()]

    expected, operators = run(theirs)
    assert "aten::_native_multi_head_attention" in operators
    got, ours_operators = run(ours)
    assert torch.equal(expected, got)
    assert "aten::_native_multi_head_attention" in ours_operators
    # Tempered it stays on the fast path, and equals the slow one.
    ours.temperature = 0.5
    fast, ours_operators = run(ours)
    assert "aten::_native_multi_head_attention" in ours_operators
    slow, _ = ours(x, x, x, key_padding_mask=padding, need_weights=need_weights)
    torch.testing.assert_close(fast[~padding], slow.detach()[~padding])
    assert not torch.allclose(fast[~padding], expected[~padding], atol=1e-3)


def encoder(ours: bool, *, norm_first: bool = False) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.2, batch_first=True, norm_first=norm_first)
    if ours:
        attention = MultiheadAttention(WIDTH, HEADS, dropout=0.2, batch_first=True)
        attention.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = attention
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.TransformerEncoder(layer, 2)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_encoder_layer_does_not_bypass_the_temperature(norm_first: bool, padded: bool, compiled: bool) -> None:
    """In evaluation nn.TransformerEncoderLayer has a fused kernel that never calls self_attn."""
    theirs, ours = encoder(False, norm_first=norm_first).eval(), encoder(True, norm_first=norm_first).eval()
    x = torch.randn(BATCH, LENGTH, WIDTH)
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[1, 2:] = True
    visible = ~padding if padded else torch.ones_like(padding)
    arguments = {"src_key_padding_mask": padding} if padded else {}
    with torch.no_grad():
        # At temperature 1 the fused kernels are in use, and nothing differs by a bit.
        assert torch.equal(theirs(x, **arguments), ours(x, **arguments))
        for layer in theirs.layers:
            divide_query_projection(layer.self_attn, 0.2)
        for layer in ours.layers:
            layer.self_attn.temperature = 0.2
        run = torch.compile(ours, backend="eager") if compiled else ours
        expected, got = theirs(x, **arguments), run(x, **arguments)
    assert not torch.allclose(encoder(False, norm_first=norm_first).eval()(x), got, atol=1e-2)
    torch.testing.assert_close(got[visible], expected[visible], rtol=1e-4, atol=1e-5)
    # With gradients enabled PyTorch takes its slow path; the same function again.
    torch.testing.assert_close(ours(x, **arguments).detach()[visible], expected[visible], rtol=1e-4, atol=1e-5)


def test_decoder_layer_and_training_use_the_temperature() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 16, dropout=0.0)
    for name in ("self_attn", "multihead_attn"):
        attention = MultiheadAttention(WIDTH, HEADS)
        attention.load_state_dict(getattr(layer, name).state_dict())
        setattr(layer, name, attention)
    x, memory = torch.randn(LENGTH, BATCH, WIDTH), torch.randn(SOURCE, BATCH, WIDTH)
    before = layer(x, memory)
    layer.self_attn.temperature = layer.multihead_attn.temperature = 0.3
    got = layer(x, memory)
    assert not torch.allclose(before, got, atol=1e-3)
    layer.self_attn.fold_temperature_()
    layer.multihead_attn.fold_temperature_()
    torch.testing.assert_close(layer(x, memory), got)


@pytest.mark.parametrize("construction", [{}, {"bias": False}, {"kdim": 5, "vdim": 7}])
def test_folding_makes_a_plain_module_compute_the_same(construction: dict[str, Any]) -> None:
    theirs, ours = pair(construction, "batch_first")
    ours.temperature = 0.6
    expected = call(ours, "batch_first", "none", "none", "average", self_attention=False)
    ours.fold_temperature_()
    assert ours.temperature == 1.0
    theirs.load_state_dict(ours.state_dict())
    got = call(theirs, "batch_first", "none", "none", "average", self_attention=False)
    check(expected[:2], got[:2], exactly=False)


def test_folding_changes_what_a_parametrized_weight_is_made_from() -> None:
    module = MultiheadAttention(WIDTH, HEADS, temperature=2.0)
    nn.utils.parametrizations.weight_norm(module, "in_proj_weight")
    x = torch.randn(3, 2, WIDTH)
    expected = module(x, x, x)[0]
    module.fold_temperature_()
    assert module.temperature == 1.0
    torch.testing.assert_close(module(x, x, x)[0], expected)


def test_folding_into_a_buffer_divides_it() -> None:
    module = MultiheadAttention(WIDTH, HEADS, temperature=2.0)
    weight = module.in_proj_weight.detach().clone()
    del module.in_proj_weight
    module.register_buffer("in_proj_weight", weight)
    x = torch.randn(3, 2, WIDTH)
    expected = module(x, x, x)[0]
    module.fold_temperature_()
    torch.testing.assert_close(module(x, x, x)[0], expected)


class Doubled(nn.Module):
    """A parametrization without `right_inverse`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.mark.parametrize(
    "make",
    [
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.orthogonal,
        lambda module, name: nn.utils.parametrize.register_parametrization(module, name, Doubled()),
        lambda module, name: prune.random_unstructured(module, name, 0.3),
    ],
)
def test_folding_into_what_cannot_be_divided_is_refused_and_changes_nothing(make: Any) -> None:
    module = MultiheadAttention(WIDTH, HEADS, temperature=2.0).eval()
    nn.init.normal_(module.in_proj_bias)
    make(module, "in_proj_weight")
    x = torch.randn(3, 2, WIDTH)
    expected = module(x, x, x)[0]
    with pytest.raises(ConfigError, match="the temperature cannot be folded into in_proj_weight, which a param"):
        module.fold_temperature_()
    assert module.temperature == 2.0
    assert torch.equal(module(x, x, x)[0], expected)


def test_reset_parameters_at_any_temperature() -> None:
    module = MultiheadAttention(WIDTH, HEADS, temperature=2.0)
    before = module.in_proj_weight.clone()
    module._reset_parameters()
    assert module.temperature == 2.0
    assert not torch.equal(before, module.in_proj_weight)


def test_a_causal_hint_without_a_mask_is_refused_as_by_pytorch() -> None:
    module = MultiheadAttention(WIDTH, HEADS)
    x = torch.randn(LENGTH, BATCH, WIDTH)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        module(x, x, x, need_weights=False, is_causal=True)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        torch.compile(module, backend="eager")(x, x, x, need_weights=False, is_causal=True)


def test_scalars_are_floats_to_read_and_write() -> None:
    module = MultiheadAttention(WIDTH, HEADS, 0.1, temperature=2.0)
    assert (module.dropout, module.temperature) == (0.1, 2.0)
    module.dropout = 0.2
    assert module.dropout_knob.value == 0.2
    assert set(module.state_dict()) == set(nn.MultiheadAttention(WIDTH, HEADS).state_dict())
    for value in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="temperature"):
            module.temperature = value
    with pytest.raises(ConfigError, match="dropout"):
        MultiheadAttention(WIDTH, HEADS, dropout=1.5)


def test_autocast() -> None:
    theirs, ours = pair({"dropout": 0.0}, "batch_first")
    x = torch.randn(BATCH, LENGTH, WIDTH)
    mask = torch.randn(LENGTH, LENGTH)
    with torch.autocast("cpu", torch.bfloat16):
        expected = theirs(x, x, x, attn_mask=mask, need_weights=False)[0]
        assert torch.equal(ours(x, x, x, attn_mask=mask, need_weights=False)[0], expected)
        ours.dropout = 0.5
        ours.dropout = 0.0
        for need_weights in (True, False):
            got = torch.compile(ours, backend="eager", fullgraph=True)(
                x, x, x, attn_mask=mask, need_weights=need_weights
            )[0]
            assert got.dtype == expected.dtype
            torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)
