"""`nn.MultiheadAttention` with a temperature and a dropout that can change at every step."""

from __future__ import annotations

import copy
import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from hdet.errors import ConfigError
from hdet.nn.attention import attention, explicit_attention
from hdet.nn.knob_tensor import SMALLEST, KnobAttribute, KnobModule, KnobTensor

ROUNDING = 16
"""Errors of rounding by which a tensor that is made from others may miss what it is to be."""


class MultiheadAttention(KnobModule, nn.MultiheadAttention):
    """`nn.MultiheadAttention` with a temperature t: softmax(q k^T / (sqrt(E / heads) t) + mask) v.

    Takes the arguments of `nn.MultiheadAttention`, and `temperature`. Masks are added after the division. The
    temperature is part of the model, in force in training and in evaluation, but not of its `state_dict`:
    call `fold_temperature_` before the weights go to a plain `nn.MultiheadAttention`.

    `module.temperature` and `module.dropout` read and write floats; `module.temperature_knob` and
    `module.dropout_knob` are the `KnobTensor`s behind them.

    In eager mode PyTorch's own forward runs, its inference fast path included; at temperature 1 the result is
    the same bit for bit. At other temperatures that forward sees the query's projection divided by t.

    Raises:
        ConfigError: a temperature that is not positive and finite, or a dropout outside [0, 1].

    >>> layer = MultiheadAttention(4, 2, batch_first=True, temperature=0.5)
    >>> x = torch.randn(1, 3, 4)
    >>> layer(x, x, x)[0].shape
    torch.Size([1, 3, 4])
    """

    dropout_knob: KnobTensor
    temperature_knob: KnobTensor
    dropout = KnobAttribute("dropout", default=0.0, low=0.0, high=1.0)
    temperature = KnobAttribute("temperature", default=1.0, low=SMALLEST)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        temperature: float = 1.0,
    ) -> None:
        # PyTorch's parameters by name: a command line or a configuration file is made from the signature.
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            device=device,
            dtype=dtype,
        )
        self.temperature = temperature

    @property
    def _qkv_same_embed_dim(self) -> bool:
        # nn.TransformerEncoderLayer asks this before it hands our weights to a fused kernel in evaluation,
        # past this module's forward. "False" keeps it from bypassing the temperature.
        if torch.compiler.is_compiling():
            return False
        packed: bool = self.__dict__["_qkv_same_embed_dim"]
        knob = self.__dict__.get("temperature_knob")  # None while PyTorch's constructor runs
        return packed and (knob is None or knob.value == 1.0)

    @_qkv_same_embed_dim.setter
    def _qkv_same_embed_dim(self, packed: bool) -> None:
        self.__dict__["_qkv_same_embed_dim"] = packed

    def _reset_parameters(self) -> None:
        # It asks _qkv_same_embed_dim too, and means what it asks.
        knob = self.__dict__.pop("temperature_knob", None)
        super()._reset_parameters()
        if knob is not None:
            self.temperature_knob = knob

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """See `nn.MultiheadAttention.forward`; same arguments, shapes and results."""
        # A causal hint without a mask is PyTorch's to refuse.
        if not torch.compiler.is_compiling() or (is_causal and attn_mask is None):
            seen = self if self.temperature == 1.0 else cast(nn.MultiheadAttention, _Tempered(self))
            return nn.MultiheadAttention.forward(
                seen, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        batched = query.dim() == 3
        if not batched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)

        # With nothing to merge it with, the causal hint stands in for the mask, as in PyTorch.
        is_causal = is_causal and key_padding_mask is None and not need_weights
        q, k, v = self._project(query, key, value)
        q = q / self.temperature_knob.on(q.device)
        mask = None
        if not is_causal:
            mask = self._mask(attn_mask, key_padding_mask, q.dtype, appended=k.shape[-2] - key.shape[1])

        weights = None
        if need_weights:
            drops = self.training and not self.dropout_knob.always_zero
            out, weights = explicit_attention(q, k, v, mask, self.dropout_knob if drops else None)
            weights = weights.mean(dim=1) if average_attn_weights else weights
        else:
            out = attention(q, k, v, mask, dropout=self.dropout_knob, training=self.training, is_causal=is_causal)
        out = F.linear(out.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return (out if self.batch_first else out.transpose(0, 1)), weights

    @torch.no_grad()
    def fold_temperature_(self) -> None:
        """Divide the query's projection by the temperature and set the temperature to 1: the same function.

        Call it when training is over: the optimizer's state still belongs to the weights as they were.

        Raises:
            ConfigError: a projection is made from other tensors in a way that cannot make it a divided one, as by
                `spectral_norm`. The module is as it was.
        """
        if self.temperature == 1.0:
            return
        before = copy.deepcopy(self.state_dict())  # first: some parametrizations change theirs where they are read
        tempered = _Tempered(self)
        plain = {**self._parameters, **self._buffers}
        for name in _QUERY_PARAMETERS:
            if name not in plain and getattr(self, name) is not None and not self._make(name, getattr(tempered, name)):
                self.load_state_dict(before)
                raise ConfigError(
                    f"the temperature cannot be folded into {name}, which a parametrization or a hook makes from other "
                    f"tensors, in a way that does not make a divided one of any; make it a parameter first, as by "
                    f"torch.nn.utils.parametrize.remove_parametrizations(module, {name!r})"
                )
        for name in _QUERY_PARAMETERS:
            if (held := plain.get(name)) is not None:
                held.copy_(getattr(tempered, name))
        self.temperature = 1.0

    def _make(self, name: str, wanted: Tensor) -> bool:
        """Change what a parametrized tensor is made from, and tell whether it is the wanted one then."""
        if not parametrize.is_parametrized(self, name):
            return False  # a hook would overwrite it
        try:
            setattr(self, name, wanted)
        except (RuntimeError, ValueError):  # it has no right inverse, or none of this
            return False
        error = torch.linalg.vector_norm(getattr(self, name) - wanted)
        return bool(error <= ROUNDING * torch.finfo(wanted.dtype).eps * torch.linalg.vector_norm(wanted))

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value `[N, L or S, E]` projected and split to `[N, heads, L or S', E / heads]`."""
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if self.in_proj_weight is not None and query is key and key is value:
            q, k, v = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        else:
            weights = (
                (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
                if self.in_proj_weight is None
                else self.in_proj_weight.chunk(3)
            )
            q, k, v = (
                F.linear(x, weight, bias) for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
            )
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat((k, self.bias_k.expand(k.shape[0], -1, -1)), dim=1)
            v = torch.cat((v, self.bias_v.expand(v.shape[0], -1, -1)), dim=1)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        q, k, v = (x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2) for x in (q, k, v))
        return q, k, v

    def _mask(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, dtype: torch.dtype, *, appended: int
    ) -> Tensor | None:
        """Both masks as one that is added to the logits `[N, heads, L, S + appended]`."""
        merged = None
        if attn_mask is not None:
            merged = _additive(attn_mask, dtype)
            if merged.dim() == 3:
                merged = merged.view(-1, self.num_heads, *merged.shape[1:])
        if key_padding_mask is not None:
            padding = _additive(key_padding_mask, dtype)[:, None, None, :]
            merged = padding if merged is None else merged + padding
        return merged if merged is None or not appended else F.pad(merged, (0, appended))


_QUERY_PARAMETERS = ("in_proj_weight", "in_proj_bias", "q_proj_weight")
"""The parameters that project the query: the first `embed_dim` rows of each."""


class _Tempered:
    """An attention module, for `nn.MultiheadAttention.forward`, with its query's projection divided by t.

    (x W^T + b) / t = x (W / t)^T + b / t, so every path of that forward, fused kernels and nested tensors
    included, computes the tempered logits without knowing of the temperature.
    """

    def __init__(self, module: MultiheadAttention) -> None:
        self._module = module
        self._qkv_same_embed_dim: bool = module.__dict__["_qkv_same_embed_dim"]
        rows = module.embed_dim
        for name in _QUERY_PARAMETERS:
            whole = getattr(module, name)
            if whole is not None:
                whole = torch.cat((whole[:rows] / module.temperature, whole[rows:]))
            setattr(self, name, whole)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
