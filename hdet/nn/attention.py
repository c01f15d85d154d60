"""Scaled dot-product attention with a temperature and a dropout that can change at every step.

    out = dropout(softmax(q k^T scale / temperature + mask)) v

In eager mode this is `F.scaled_dot_product_attention` at the host's floats, fused kernels included, and the
same bit for bit when the temperature is 1. Compiled, the query is divided by a tensor (`scale=tensor` would
break the graph) and the fused kernels stay in use, with one exception: they take their dropout as a float, so
with a dropout that has ever been above 0 the weights are computed explicitly, which costs memory quadratic in
the sequence length.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from hdet.nn.dropout import dropout_noise
from hdet.nn.knob_tensor import SMALLEST, KnobAttribute, KnobModule, KnobTensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    temperature: KnobTensor | None = None,
    dropout: KnobTensor | None = None,
    training: bool = True,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention`, and its arguments, with knob tensors for temperature and dropout.

    Args:
        query, key, value: `[..., heads, L, E]`, `[..., heads, S, E]` and `[..., heads, S, V]`.
        attn_mask: broadcastable to `[..., heads, L, S]`; True takes part, or a float that is added to the
            logits after the division: the temperature does not scale it.
        temperature: divides q k^T scale; None for 1.
        dropout: the probability to drop a weight, in force only when `training`; None for 0.
        training: the module's `training` flag.

    Returns:
        `[..., heads, L, V]`.

    >>> q = k = torch.eye(2)[None]
    >>> v = torch.tensor([[[1.0], [0.0]]])
    >>> attention(q, k, v, temperature=KnobTensor(1e3)).round(decimals=2).flatten()
    tensor([0.5000, 0.5000])
    >>> attention(q, k, v, temperature=KnobTensor(1e-3)).flatten()
    tensor([1., 0.])
    """
    if temperature is not None:
        query, scale = divide_logits(query, scale, temperature)
    if not training or (dropout is not None and dropout.always_zero):
        dropout = None
    if dropout is not None and torch.compiler.is_compiling():
        if enable_gqa:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], dim=-3)
        return explicit_attention(query, key, value, attn_mask, dropout, is_causal=is_causal, scale=scale)[0]
    probability = dropout.value if dropout is not None else 0.0
    repeated = {"enable_gqa": True} if enable_gqa else {}
    return F.scaled_dot_product_attention(query, key, value, attn_mask, probability, is_causal, scale=scale, **repeated)


def divide_logits(query: Tensor, scale: float | None, temperature: KnobTensor) -> tuple[Tensor, float | None]:
    """The query and scale that divide the logits by the temperature, in eager mode at no cost."""
    if torch.compiler.is_compiling():
        return query / temperature.on(query.device), scale
    if temperature.value == 1.0:
        return query, scale
    return query, (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale) / temperature.value


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: KnobTensor | None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention from its weights, and the weights `[..., heads, L, S]` themselves, after dropout.

    A query that may attend to nothing gets zeros, as from PyTorch's fused kernels, not NaN.
    """
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is None:
        weights = scores.softmax(dim=-1)
    else:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        empty = (scores == -math.inf).all(dim=-1, keepdim=True)
        weights = scores.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)
    if dropout is not None:
        weights = weights * dropout_noise(weights, dropout.on(weights.device))
    return weights.to(value.dtype) @ value, weights


class Temperature(KnobModule):
    """x / temperature, for attention that is written by hand: apply it to the queries or to the logits.

    Args:
        temperature: the value to start from, above 0. `module.temperature` reads and writes it as a float;
            `module.temperature_knob` is the `KnobTensor` behind it.

    Raises:
        ConfigError: the temperature is not a positive finite number.

    >>> temperature = Temperature()
    >>> temperature.temperature = 2.0
    >>> temperature(torch.tensor([1.0, 3.0]))
    tensor([0.5000, 1.5000])
    """

    temperature_knob: KnobTensor
    temperature = KnobAttribute("temperature", default=1.0, low=SMALLEST)

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return x / self.temperature_knob.on(x.device)
        return x if self.temperature == 1.0 else x / self.temperature

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}"
