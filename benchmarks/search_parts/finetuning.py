"""Fine-tuning: a byte GPT that knows Python's source, on a little of its manual, which is English prose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hdet.app.tasks import Text
from hdet.app.tasks.text import standard_library
from hdet.schedules import Cosine
from search_parts.examples import built
from search_parts.task import Task
from search_parts.text import TextProblem

WIDTH, DEPTH, HEADS, CONTEXT = 64, 2, 4, 64
PRETRAINED_STEPS, PRETRAINED_BATCH, PRETRAINED_RATE = 1500, 16, 0.01
TRAIN_BYTES = 60_000
RANK, SCALE = 4, 2.0
Bytes = NDArray[np.uint8]


@lru_cache(maxsize=1)
def manual() -> dict[str, Bytes]:
    """The language reference as `pydoc` has it: of ten topics one is test, one probe, and a part of the rest train."""
    parts: dict[str, list[str]] = {"train": [], "probe": [], "test": []}
    for number, name in enumerate(sorted(topics)):
        parts[{0: "test", 5: "probe"}.get(number % 10, "train")].append(topics[name])
    whole = {name: np.frombuffer("\n".join(texts).encode(), dtype=np.uint8) for name, texts in parts.items()}
    return {**whole, "train": whole["train"][:TRAIN_BYTES]}


@lru_cache(maxsize=1)
def pretrained() -> dict[str, Tensor]:
    """The weights after 1500 steps on the standard library's source; the file that holds the manual is left out."""
    text = Text(width=WIDTH, depth=DEPTH, heads=HEADS, context=CONTEXT).build(seed=0, batch_size=PRETRAINED_BATCH)
    text.splits = {**text.splits, "train": _without_manual(standard_library()["train"])}
    model = text.model()
    optimizer = torch.optim.AdamW(text.groups(model), lr=PRETRAINED_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = Cosine(peak=PRETRAINED_RATE, total_steps=PRETRAINED_STEPS, warmup=0.1)
    for step in range(PRETRAINED_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        text.loss(model, text.batch(step, 0)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _without_manual(data: Bytes) -> Bytes:
    """The source's bytes less the longest stretch that is `pydoc_data/topics.py`, where it is among them."""
    import pydoc_data.topics as module

    with open(module.__file__, "rb") as file:
        held = file.read()
    start = data.tobytes().find(held)
    return data if start < 0 else np.concatenate([data[:start], data[start + len(held) :]])


class LowRank(nn.Module):
    """A frozen linear layer and a trained update of low rank (LoRA, Hu et al. 2021, arXiv:2106.09685).

    W x + (scale / rank) B A x; A is normal with the standard deviation 1 / sqrt(inputs), B is 0.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(RANK, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        return self.layer(x) + SCALE / RANK * (x @ self.down.T @ self.up.T)  # type: ignore[no-any-return]


class FineTuningProblem(TextProblem):
    """The manual's text, and a model that begins from the pretrained weights."""

    def __init__(self, text: Text, *, seed: int, batch: int, low_rank: bool) -> None:
        super().__init__(text, seed=seed, batch=batch)
        self.workload.splits = manual()
        self.low_rank = low_rank

    def model(self) -> nn.Module:
        model, weights = super().model(), pretrained()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        return built(self.workload.seed, lambda: _adapted(model)) if self.low_rank else model

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": list(_trained(model))}] if self.low_rank else super().groups(model)


def _adapted(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    for block in model.get_submodule("blocks").children():
        for name, layer in list(block.named_modules()):
            if isinstance(layer, nn.Linear):
                parent, _, own = name.rpartition(".")
                setattr(block.get_submodule(parent), own, LowRank(layer))
    return model


def _trained(model: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in model.parameters() if parameter.requires_grad)


@dataclass(frozen=True, kw_only=True)
class FineTuningTask(Task):
    """Fine-tuning of all weights, or of adapters of low rank alone."""

    low_rank: bool

    def problem(self, seed: int, dropout: float) -> FineTuningProblem:
        text = Text(
            width=WIDTH,
            depth=DEPTH,
            heads=HEADS,
            context=CONTEXT,
            dropout=dropout,
            probe_batches=self.sub_batches,
            probe_sequences=2,
        )
        return FineTuningProblem(text, seed=seed, batch=self.batch, low_rank=self.low_rank)
