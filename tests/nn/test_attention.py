import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from hdet.errors import ConfigError
from hdet.nn import KnobTensor, Temperature, attention
from hdet.nn.attention import explicit_attention

HEADS, LENGTH, SOURCE, WIDTH = 2, 4, 6, 8


def inputs(*, kv_heads: int = HEADS, source: int = SOURCE) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = [(3, HEADS, LENGTH, WIDTH), (3, kv_heads, source, WIDTH), (3, kv_heads, source, WIDTH)]
    q, k, v = (torch.randn(shape).requires_grad_() for shape in shapes)
    return q, k, v


def mask(kind: str) -> Tensor | None:
    torch.manual_seed(2)
    if kind == "bool":
        allowed = torch.rand(3, 1, LENGTH, SOURCE) > 0.4
        allowed[..., 0] = True
        return allowed
    return torch.randn(LENGTH, SOURCE) if kind == "float" else None


def reference(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, tau: float, scale: float | None = None
) -> Tensor:
    """softmax(q k^T scale / tau + mask) v, written out."""
    logits = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale) / tau
    if attn_mask is not None:
        logits = logits.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else logits + attn_mask
    return logits.softmax(dim=-1) @ v


def gradients(output: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    weights = torch.arange(output.numel(), dtype=output.dtype).view_as(output).cos()
    return torch.autograd.grad((output * weights).sum(), leaves)


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_temperature_divides_the_logits(kind: str, compiled: bool, scale: float | None) -> None:
    q, k, v = inputs()
    temperature = KnobTensor(1.0)
    call = torch.compile(attention, backend="eager", fullgraph=True) if compiled else attention
    for tau in (0.25, 1.0, 3.0):
        temperature.fill_(tau)
        got = call(q, k, v, mask(kind), temperature=temperature, scale=scale)
        expected = reference(q, k, v, mask(kind), tau, scale)
        torch.testing.assert_close(got, expected)
        for ours, theirs in zip(gradients(got, q, k, v), gradients(expected, q, k, v), strict=True):
            torch.testing.assert_close(ours, theirs)


@given(
    kind=st.sampled_from(["none", "bool", "float", "causal"]),
    scale=st.sampled_from([None, 0.2]),
    grouped=st.booleans(),
    p=st.sampled_from([0.0, 0.3]),
    training=st.booleans(),
)
@settings(max_examples=40)
def test_eager_at_one_is_bitwise_pytorch(
    kind: str, scale: float | None, grouped: bool, p: float, training: bool
) -> None:
    q, k, v = inputs(kv_heads=1 if grouped else HEADS)
    causal = kind == "causal"
    torch.manual_seed(5)
    got = attention(
        q,
        k,
        v,
        mask(kind),
        temperature=KnobTensor(1.0),
        dropout=KnobTensor(p),
        training=training,
        is_causal=causal,
        scale=scale,
        enable_gqa=grouped,
    )
    state = torch.get_rng_state()
    torch.manual_seed(5)
    expected = F.scaled_dot_product_attention(
        q, k, v, mask(kind), p if training else 0.0, causal, scale=scale, enable_gqa=grouped
    )
    assert torch.equal(got, expected)
    assert torch.equal(state, torch.get_rng_state())
    for ours, theirs in zip(gradients(got, q, k, v), gradients(expected, q, k, v), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["none", "bool", "float", "causal"])
@pytest.mark.parametrize("grouped", [False, True])
def test_compiled_explicit_path_agrees(kind: str, grouped: bool) -> None:
    """A dropout that was once on and is now 0 takes the explicit path, deterministically."""
    q, k, v = inputs(kv_heads=1 if grouped else HEADS)
    dropout = KnobTensor(0.5).fill_(0.0)
    arguments = {"is_causal": kind == "causal", "enable_gqa": grouped, "temperature": KnobTensor(0.7)}
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    got = compiled(q, k, v, mask(kind), dropout=dropout, **arguments)
    expected = attention(q, k, v, mask(kind), **arguments)
    torch.testing.assert_close(got, expected)
    for ours, theirs in zip(gradients(got, q, k, v), gradients(expected, q, k, v), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_compiled_dropout_is_unbiased_and_in_force_only_in_training() -> None:
    q, k, v = (x.detach() for x in inputs())
    dropout = KnobTensor(0.4)
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    torch.manual_seed(0)
    draws = torch.stack([compiled(q, k, v, dropout=dropout) for _ in range(2000)])
    expected = attention(q, k, v)
    error = (draws.mean(dim=0) - expected) / (draws.std(dim=0) / 2000**0.5)
    assert error.abs().max() < 5
    assert draws.std(dim=0).min() > 0
    assert torch.equal(compiled(q, k, v, dropout=dropout, training=False), expected)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_query_with_nothing_to_attend_to_gets_zeros_and_no_nan(kind: str) -> None:
    q, k, v = inputs()
    allowed = torch.ones(LENGTH, SOURCE, dtype=torch.bool)
    allowed[1] = False
    given = allowed if kind == "bool" else torch.zeros(LENGTH, SOURCE).masked_fill(~allowed, -math.inf)
    out, weights = explicit_attention(q, k, v, given, None)
    assert torch.equal(weights[..., 1, :], torch.zeros_like(weights[..., 1, :]))
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, given))
    assert all(gradient.isfinite().all() for gradient in gradients(out, q, k, v))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_types_are_kept(dtype: torch.dtype) -> None:
    q, k, v = (x.detach().to(dtype) for x in inputs())
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    for dropout in (None, KnobTensor(0.5)):
        assert compiled(q, k, v, temperature=KnobTensor(2.0), dropout=dropout).dtype == dtype
    assert torch.compile(Temperature(2.0), backend="eager")(q).dtype == dtype


def test_temperature_module() -> None:
    module = Temperature()
    x = torch.randn(5)
    assert torch.equal(module(x), x)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    for tau in (0.5, 1.0, 2.0):
        module.temperature = tau
        assert torch.equal(module(x), x / tau)
        assert torch.equal(compiled(x), x / tau)
    assert repr(module) == "Temperature(temperature=2.0)"
    with pytest.raises(ConfigError, match="temperature"):
        module.temperature = 0.0
    with pytest.raises(ConfigError, match="temperature"):
        Temperature(-1.0)
