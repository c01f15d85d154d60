"""Handwritten digits with some labels wrong: a small task on which regularisation pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.app.tasks.draws import draws
from hdet.app.tasks.task import Task, decaying_matrices
from hdet.errors import MissingExtraError
from hdet.nn import CrossEntropyLoss, Dropout
from hdet.replicas.tensors import evaluating
from hdet.spec import register

CLASSES = 10
SIZES = {"train": 997, "probe": 400, "test": 400}
Examples = tuple[Tensor, Tensor]


@register
class Digits(Task):
    """A perceptron on scikit-learn's 1,797 digits of 8x8 pixels: 997 to train, 400 to probe, 400 to test.

    Attributes:
        width: units of a hidden layer.
        depth: hidden layers, each followed by ReLU and dropout.
        dropout: rate after each hidden layer.
        label_noise: fraction of labels, in all three splits, replaced by one of the ten digits at random. The
            lowest reachable loss is then that of the noise, and overconfidence costs.
        probe_batches: sub-batches of a window's probe; their scatter gives the standard errors.
        probe_examples: examples in each of them.

    Needs scikit-learn (the extra `cli`).

    >>> Digits(label_noise=0.2).kind
    'digits'
    """

    width: int = Field(default=64, ge=1, le=65536)
    depth: int = Field(default=2, ge=1, le=128)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    label_noise: float = Field(default=0.0, ge=0.0, le=1.0)
    probe_batches: int = Field(default=8, ge=2, le=1024)
    probe_examples: int = Field(default=32, ge=1, le=65536)

    def build(self, *, seed: int, batch_size: int, device: str = "cpu") -> DigitsWorkload:
        return DigitsWorkload(self, seed=seed, batch_size=batch_size, device=device)


class Perceptron(nn.Module):
    """Hidden layers of ReLU and dropout; weights uniform in +-sqrt(3 / inputs), from `generator` alone."""

    def __init__(self, *, width: int, depth: int, dropout: float, generator: torch.Generator) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 64
        with torch.random.fork_rng(devices=[]):  # torch's layers draw weights we overwrite below
            for _ in range(depth):
                layers += [nn.Linear(inputs, width), nn.ReLU(), Dropout(dropout)]
                inputs = width
            layers.append(nn.Linear(inputs, CLASSES))
        self.layers = nn.Sequential(*layers)
        self.criterion = CrossEntropyLoss()
        for parameter in self.parameters():
            if parameter.dim() == 2:
                bound = (3.0 / parameter.shape[1]) ** 0.5
                nn.init.uniform_(parameter, -bound, bound, generator=generator)
            else:
                nn.init.zeros_(parameter)

    def forward(self, pixels: Tensor) -> Tensor:
        """[batch, 64] in [0, 1] to logits [batch, 10]."""
        return self.layers(pixels)  # type: ignore[no-any-return]


class DigitsWorkload:
    """The three splits of a `Digits` task; a batch is (pixels [batch, 64], labels [batch])."""

    facts: Mapping[str, str]

    def __init__(self, task: Digits, *, seed: int, batch_size: int, device: str) -> None:
        self.task = task
        self.seed = seed
        self.batch_size = batch_size
        self.device = torch.device(device)
        self.splits, self.facts = _load(task.label_noise, self.device)

    def model(self) -> Perceptron:
        return Perceptron(
            width=self.task.width,
            depth=self.task.depth,
            dropout=self.task.dropout,
            generator=torch.Generator().manual_seed(self.seed),
        ).to(self.device)

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        return decaying_matrices(model)

    def batch(self, step: int, replica: int) -> Examples:
        return self._examples(self.batch_size, "train", step=step, replica=replica)

    def loss(self, model: nn.Module, batch: Examples) -> Tensor:
        """Nats per digit; the model's own criterion in training, plain cross-entropy in eval mode."""
        pixels, labels = batch
        if model.training:
            return model.get_submodule("criterion")(model(pixels), labels)  # type: ignore[no-any-return]
        return F.cross_entropy(model(pixels), labels)

    def probe(self, window: int) -> Sequence[Examples]:
        size = self.task.probe_examples
        pixels, labels = self._examples(self.task.probe_batches * size, "probe", step=window)
        return list(zip(torch.split(pixels, size), torch.split(labels, size), strict=True))

    def test_loss(self, model: nn.Module) -> float:
        with evaluating(model), torch.no_grad():
            return float(self.loss(model, self.splits["test"]))

    def _examples(self, count: int, split: str, *, step: int, replica: int = 0) -> Examples:
        pixels, labels = self.splits[split]
        chosen = torch.from_numpy(
            draws(count, below=len(labels), seed=self.seed, stream=split, step=step, replica=replica)
        ).to(self.device)
        return pixels[chosen], labels[chosen]


def _load(label_noise: float, device: torch.device) -> tuple[dict[str, Examples], dict[str, str]]:
    """The splits, shuffled and with noisy labels, the same for every seed; and what they are in words."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise MissingExtraError("scikit-learn", "cli") from None
    pixels, labels = load_digits(return_X_y=True)
    count = len(labels)
    order = np.argsort(draws(count, below=2**62, seed=0, stream="order"), kind="stable")
    wrong = draws(count, below=2**32, seed=0, stream="which") < label_noise * 2**32
    labels = np.where(wrong, draws(count, below=CLASSES, seed=0, stream="label"), labels)
    splits: dict[str, Examples] = {}
    facts: dict[str, str] = {}
    start = 0
    for name, size in SIZES.items():
        chosen = order[start : start + size]
        start += size
        x = np.ascontiguousarray(pixels[chosen] / 16.0, dtype=np.float32)
        y = np.ascontiguousarray(labels[chosen], dtype=np.int64)
        splits[name] = (torch.from_numpy(x).to(device), torch.from_numpy(y).to(device))
        facts[name] = f"{size} digits, sha256 {sha256(x.tobytes() + y.tobytes()).hexdigest()}"
    return splits, facts
