"""A word-level GPT on WikiText, as papers report it: against OneCycleLR and cosine, with hdet or without.

    python examples/wikitext_gpt.py wikitext-2 --schedule cosine
    python examples/wikitext_gpt.py wikitext-2 --schedule cosine --hdet
    python examples/wikitext_gpt.py wikitext-2 --schedule one_cycle --lr 1e-4 --hdet --window 50 --micro-batches 4

The folder is the data set's own (Merity et al., 2016): `wiki.train.tokens`, `wiki.valid.tokens` and `wiki.test.tokens`.
Nothing is downloaded. The probe reads the validation text; the test text is looked at once, at the end. What is printed
is perplexity per word, <unk> and the ends of lines counted as words.
"""

import argparse
import json
import math
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hdet


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
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(y))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Called with words [batch, time + 1], it returns the loss of predicting each next one; embeddings are tied."""

    def __init__(self, words: int, context: int, width: int, depth: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(words, width), nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.embedding, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        inputs, following = text[:, :-1], text[:, 1:]
        x = self.dropout(self.embedding(inputs) + self.position(torch.arange(inputs.shape[1], device=text.device)))
        logits = self.norm(self.blocks(x)) @ self.embedding.weight.T
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def words_of(path: Path) -> Iterator[list[str]]:
    """The words of each line, its end included. WikiText-103 would not fit into memory as strings."""
    with path.open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            yield line.replace("\n", " <eos> ").split()


def read(folder: Path) -> tuple[dict[str, Tensor], int]:
    """The words of each text as numbers [count], and how many different ones the training text has."""
    counts = Counter(["<unk>"])
    for words in words_of(folder / "wiki.train.tokens"):
        counts.update(words)
    numbers = {word: number for number, (word, _) in enumerate(counts.most_common())}
    unknown = numbers["<unk>"]
    texts = {}
    for split in ("train", "valid", "test"):
        held = array("i")
        for words in words_of(folder / f"wiki.{split}.tokens"):
            held.extend([numbers.get(word, unknown) for word in words])
        texts[split] = torch.frombuffer(held, dtype=torch.int32)
    return texts, len(numbers)


def sequences(text: Tensor, count: int, context: int, numbers: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - context, (count,), generator=numbers)
    return torch.stack([text[start : start + context + 1] for start in starts]).long()


def scheduler_of(name: str, optimizer: torch.optim.Optimizer, lr: float, steps: int) -> Any:
    if name == "one_cycle":
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps + 1, cycle_momentum=False)
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def train(options: argparse.Namespace) -> dict[str, float]:
    """Train; returns loss (nats per word) and perplexity on the test text."""
    torch.manual_seed(options.seed)
    texts, words = read(options.folder)
    context, parts = options.context, options.micro_batches
    model = GPT(words, context, options.width, options.depth, options.heads, options.dropout)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, weight_decay=0.1, betas=(0.9, 0.95))
    scheduler = scheduler_of(options.schedule, optimizer, options.lr, options.steps)
    search = None
    if options.hdet:

        def sub_batches(window: int) -> list[Tensor]:
            drawn = torch.Generator().manual_seed(window)
            return [sequences(texts["valid"], max(1, options.batch // 8), context, drawn) for _ in range(8)]

        search = hdet.attach(
            model,
            optimizer,
            probe=hdet.Probe(lambda model, batch: model(batch), sub_batches),
            total_steps=options.steps,
            scheduler=scheduler,
            micro_batches=parts,
            window=options.window,
        )

    numbers = torch.Generator().manual_seed(options.seed)
    for step in range(options.steps):
        for batch in sequences(texts["train"], options.batch, context, numbers).chunk(parts):
            loss = model(batch)
            (loss / parts).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step}: training loss {loss.item():.3f}", flush=True)

    if search is not None:
        print(search.shifts)
    model.eval()
    length = (len(texts["test"]) - 1) // context * context
    rows = texts["test"][: length + 1].unfold(0, context + 1, context)  # every word is predicted once
    with torch.no_grad():
        total = sum(float(model(part.long())) * len(part) for part in rows.split(16))
    loss = total / len(rows)
    return {"test_loss": loss, "perplexity": math.exp(loss)}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--schedule", choices=["one_cycle", "cosine"], default="cosine")
    parser.add_argument("--hdet", action="store_true", help="find the hyperparameters while training")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--micro-batches", type=int, default=2, help="N: passes of a step, at levels of their own")
    parser.add_argument("--window", type=int, help="T: steps between two readings; by default they grow")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a folder for result.json, as studies/wikitext.yaml wants it")
    return parser


if __name__ == "__main__":
    options = arguments().parse_args()
    found = train(options)
    print(f"test loss {found['test_loss']:.4f} nats per word, perplexity {found['perplexity']:.2f}")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "result.json").write_text(json.dumps(found))
