"""Next-byte prediction on the source text of Python's own standard library: real text on every machine."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.app.tasks.draws import draws
from hdet.app.tasks.gpt import GPT, VOCABULARY
from hdet.app.tasks.task import Task, decaying_matrices
from hdet.errors import ConfigError
from hdet.replicas.tensors import evaluating
from hdet.spec import register

SPLITS = ("train", "probe", "test")
TEST_CHUNK = 64


@register
class Text(Task):
    """A byte-level GPT on the standard library's .py files, split by file into train, probe and test.

    Attributes:
        width: channels of the residual stream.
        depth: transformer blocks.
        heads: attention heads; must divide `width`.
        context: bytes in a sequence.
        dropout: rate after the embedding and on both branches of each block.
        train_bytes: train on this many bytes only, so that the data repeat and regularisation matters.
        probe_batches: sub-batches of a window's probe; their scatter gives the standard errors.
        probe_sequences: sequences in each of them.
        test_sequences: sequences in the fixed test set, the same for every seed.

    The default model has 0.12 million parameters.

    >>> Text(width=32, depth=1).kind
    'text'
    """

    width: int = Field(default=64, ge=1, le=8192)
    depth: int = Field(default=2, ge=1, le=128)
    heads: int = Field(default=4, ge=1, le=256)
    context: int = Field(default=64, ge=2, le=65536)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    train_bytes: int | None = Field(default=None, ge=1)
    probe_batches: int = Field(default=8, ge=2, le=1024)
    probe_sequences: int = Field(default=8, ge=1, le=65536)
    test_sequences: int = Field(default=512, ge=1, le=65536)

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Text:
        if self.width % self.heads:
            raise ValueError(f"heads must divide width; {self.heads} does not divide {self.width}")
        return self

    def build(self, *, seed: int, batch_size: int, device: str = "cpu") -> TextWorkload:
        return TextWorkload(self, seed=seed, batch_size=batch_size, device=device)


class TextWorkload:
    """The data of a `Text` task in memory; a batch is a [sequences, context + 1] tensor of bytes."""

    facts: Mapping[str, str]

    def __init__(self, task: Text, *, seed: int, batch_size: int, device: str) -> None:
        self.task = task
        self.seed = seed
        self.batch_size = batch_size
        self.device = torch.device(device)
        self.splits = standard_library()
        if task.train_bytes is not None:
            self.splits = {**self.splits, "train": self.splits["train"][: task.train_bytes]}
        for name, data in self.splits.items():
            if len(data) <= task.context:
                raise ConfigError(
                    f"the {name} split holds {len(data)} bytes, too few for context={task.context}; "
                    f"lower the context or raise train_bytes"
                )
        self.facts = {
            name: f"{len(data):,} bytes, sha256 {sha256(data.data).hexdigest()}" for name, data in self.splits.items()
        }

    def model(self) -> GPT:
        return GPT(
            width=self.task.width,
            depth=self.task.depth,
            heads=self.task.heads,
            context=self.task.context,
            dropout=self.task.dropout,
            generator=torch.Generator().manual_seed(self.seed),
        ).to(self.device)

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        return decaying_matrices(model)

    def batch(self, step: int, replica: int) -> Tensor:
        return self._sequences(self.batch_size, "train", seed=self.seed, step=step, replica=replica)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Nats per byte; the model's own criterion in training, plain cross-entropy in eval mode."""
        logits = model(batch[:, :-1]).reshape(-1, VOCABULARY)
        targets = batch[:, 1:].reshape(-1)
        if model.training:
            return model.get_submodule("criterion")(logits, targets)  # type: ignore[no-any-return]
        return F.cross_entropy(logits, targets)

    def probe(self, window: int) -> Sequence[Tensor]:
        count = self.task.probe_batches * self.task.probe_sequences
        sequences = self._sequences(count, "probe", seed=self.seed, step=window)
        return torch.split(sequences, self.task.probe_sequences)

    def test_loss(self, model: nn.Module) -> float:
        chunks = torch.split(self._sequences(self.task.test_sequences, "test", seed=0), TEST_CHUNK)
        with evaluating(model), torch.no_grad():
            total = sum(float(self.loss(model, chunk)) * len(chunk) for chunk in chunks)
        return total / self.task.test_sequences

    def _sequences(self, count: int, split: str, *, seed: int, step: int = 0, replica: int = 0) -> Tensor:
        data = self.splits[split]
        length = self.task.context + 1
        starts = draws(count, below=len(data) - length + 1, seed=seed, stream=split, step=step, replica=replica)
        return torch.from_numpy(data[starts[:, None] + np.arange(length)].astype(np.int64)).to(self.device)


@lru_cache(maxsize=1)
def standard_library() -> dict[str, NDArray[np.uint8]]:
    """The bytes of the standard library's .py files: 5 % of the files are probe, 5 % test, the rest train.

    A hash of its path decides a file's split and its place within it, so the split does not depend on the
    machine; the content is that of the running Python, and its hash is reported.

    Raises:
        ConfigError: Python's standard library is not there as files (a zipped or embedded Python).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: dict[str, list[tuple[bytes, Path]]] = {name: [] for name in SPLITS}
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if {"site-packages", "dist-packages"}.intersection(relative.parts):
            continue
        digest = blake2b(relative.as_posix().encode(), digest_size=8).digest()
        percent = int.from_bytes(digest, "little") % 100
        parts["probe" if percent < 5 else "test" if percent < 10 else "train"].append((digest, path))
    if not all(parts.values()):
        raise ConfigError(
            f"the text task reads the standard library's .py files, and {root} holds too few of them; "
            f"use a full Python installation, or a task of your own (kind: imported)"
        )
    return {
        name: np.frombuffer(b"".join(path.read_bytes() for _, path in sorted(files)), dtype=np.uint8)
        for name, files in parts.items()
    }
