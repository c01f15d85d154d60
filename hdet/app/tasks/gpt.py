"""A byte-level GPT whose dropout, attention temperature and label smoothing can be knobs."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hdet.nn import CrossEntropyLoss, Dropout, Temperature, attention

VOCABULARY = 256


class CausalAttention(nn.Module):
    """Multi-head causal self-attention, softmax(q k^T / (sqrt(head width) temperature)) v."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.temperature = Temperature(1.0)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] to the same."""
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = attention(q, k, v, is_causal=True, temperature=self.temperature.temperature_knob)
        y = y.transpose(1, 2).reshape(batch, time, width)
        return self.out(y)  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """A pre-norm transformer block: x + attention(norm(x)), x + mlp(norm(x)), dropout on both branches."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.attention_dropout = Dropout(dropout)
        self.mlp_dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] to the same."""
        x = x + self.attention_dropout(self.attention(self.attention_norm(x)))
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Learned positions, `depth` pre-norm blocks, the output head tied to the byte embedding.

    Args:
        width: channels of the residual stream; a multiple of `heads`.
        context: bytes the model sees at most.
        generator: decides the initial weights (normal, sd 0.02; residual projections divided by
            sqrt(2 depth), as in GPT-2). The global generator is left as it was.
    """

    def __init__(
        self, *, width: int, depth: int, heads: int, context: int, dropout: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):  # torch's layers draw weights we overwrite below
            self.embedding = nn.Embedding(VOCABULARY, width)
            self.position = nn.Embedding(context, width)
            self.dropout = Dropout(dropout)
            self.blocks = nn.ModuleList(TransformerBlock(width, heads, dropout) for _ in range(depth))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.criterion = CrossEntropyLoss()
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                residual = name.endswith(("attention.out.weight", "mlp.2.weight"))
                scale = 0.02 / math.sqrt(2 * depth) if residual else 0.02
                nn.init.normal_(parameter, std=scale, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Bytes [batch, time] to logits [batch, time, 256]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]
