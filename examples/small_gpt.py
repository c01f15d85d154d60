"""A small GPT in one file, trained on the standard library's own source, with or without hdet.

    python examples/small_gpt.py --hdet         # finds learning rate, weight decay and dropout on the way
    python examples/small_gpt.py                # the same run without: compare the last line

The flag adds one call; the loop is the same. The rate is ten times too low, as a first guess may be.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hdet

CONTEXT = 64
BATCH = 16


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        shape = (batch, time, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.attention_norm(x)).view(shape).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, time, width)
        x = x + self.dropout(self.out(y))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """A byte-level GPT; called with bytes [batch, time + 1], it returns the loss of predicting each next one."""

    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        inputs, following = text[:, :-1], text[:, 1:]
        x = self.embedding(inputs) + self.position(torch.arange(inputs.shape[1], device=text.device))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def source() -> tuple[Tensor, Tensor]:
    """The standard library's source as bytes: nine tenths to train on, one tenth held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)
    cut = 9 * len(text) // 10
    return text[:cut], text[cut:]


def sequences(text: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    starts = torch.randint(len(text) - CONTEXT - 1, (count,), generator=generator)
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long()


def train(steps: int, search_too: bool) -> float:
    """Train, and return the held-out loss."""
    torch.manual_seed(0)
    text, unseen = source()
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, betas=(0.9, 0.99))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=3e-4, total_steps=steps + 1, anneal_strategy="linear", cycle_momentum=False
    )
    search = None
    if search_too:
        half, numbers = len(unseen) // 2, torch.Generator().manual_seed(1)
        held_out = [sequences(unseen[:half], 4, numbers) for _ in range(8)]
        probe = hdet.Probe(lambda model, batch: model(batch), held_out)
        search = hdet.attach(model, optimizer, probe=probe, total_steps=steps, scheduler=scheduler)

    for step in range(steps):
        loss = model(sequences(text, BATCH))  # the model returns its loss, and hdet finds it there
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: training loss {loss.item():.3f}")

    if search is not None:
        for name, learned in search.shifts.items():
            print(f"{name}: {learned}")
    model.eval()
    with torch.no_grad():
        numbers = torch.Generator().manual_seed(2)
        return float(model(sequences(unseen[len(unseen) // 2 :], 256, numbers)))  # apart from what the probe saw


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--hdet", action="store_true", help="find the hyperparameters while training")
    options = parser.parse_args()
    print(f"held-out loss {train(options.steps, options.hdet):.4f}")
