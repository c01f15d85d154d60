"""A task of the benchmark: what is trained, which fixed settings are swept, where runs start."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

MOST_DROPOUT = 0.8


@dataclass(frozen=True)
class Setting:
    """The hyperparameters a run begins with: peak learning rate, weight decay, dropout."""

    lr: float
    decay: float
    dropout: float = 0.0


@dataclass(frozen=True)
class Start:
    """A starting point: factors on the best fixed setting of the sweep, or a setting. Dropout stops at 0.8.

    Attributes:
        at: in place of the factors, a setting that is the same whatever the best one is.
    """

    name: str
    lr: float = 1.0
    decay: float = 1.0
    dropout: float = 1.0
    at: Setting | None = None

    def setting(self, best: Setting) -> Setting:
        """The setting a run begins with.

        >>> Start("dropout x10", dropout=10).setting(Setting(0.1, 1e-3, 0.2))
        Setting(lr=0.1, decay=0.001, dropout=0.8)
        """
        return self.at or Setting(
            best.lr * self.lr,
            best.decay * self.decay,
            min(max(MOST_DROPOUT, best.dropout), best.dropout * self.dropout),
        )


LEARNING_RATES = tuple(Start(f"lr x{factor:g}", lr=factor) for factor in (0.01, 0.1, 0.3, 1, 3, 10, 30))
RIGHT = Start("lr x1")
SIZES = tuple(start for start in LEARNING_RATES if start.lr in (0.1, 1, 10))
DECAYS = tuple(Start(f"decay x{factor:g}", decay=factor) for factor in (0.1, 10))
DROPOUTS = tuple(Start(f"dropout x{factor:g}", dropout=factor) for factor in (0.1, 10))
ALL_OFF = (Start("all x0.1", 0.1, 0.1, 0.1), Start("all x10", 10, 10, 10))
# An orthogonal array of three levels each, none of whose nine rows is right in all three.
NINE = tuple(
    Start(f"nine {3 * a + b + 1}", lr=(1 / 8, 1, 8)[a], decay=(0.01, 0.3, 10)[b], dropout=(0.0, 1.0, 10.0)[(a + b) % 3])
    for a, b in itertools.product(range(3), repeat=2)
)
QUICK = ("lr x0.1", "lr x1", "lr x10")


@dataclass(frozen=True)
class Grid:
    """Fixed settings to sweep: every combination."""

    lrs: tuple[float, ...]
    decays: tuple[float, ...]
    dropouts: tuple[float, ...] = (0.0,)

    def settings(self) -> list[Setting]:
        """Every combination."""
        return [Setting(*values) for values in itertools.product(self.lrs, self.decays, self.dropouts)]

    def thinned(self) -> Grid:
        """Every other learning rate, and the middle of the rest: for a quick look."""
        return Grid(
            self.lrs[len(self.lrs) // 2 % 2 :: 2],
            self.decays[len(self.decays) // 2 :][:1],
            self.dropouts[len(self.dropouts) // 2 :][:1],
        )


def doubling(first: float, count: int) -> tuple[float, ...]:
    """first, 2 first, 4 first, ...

    >>> doubling(0.5, 3)
    (0.5, 1.0, 2.0)
    """
    return tuple(first * 2.0**k for k in range(count))


class Problem(ABC):
    """A task's data and model for one seed and dropout rate. Train, probe and test data are apart."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A fresh model, the same at each call."""

    @abstractmethod
    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Parameter groups; those that must not decay say so."""

    @abstractmethod
    def batch(self, step: int) -> Any:
        """The training batch of a step, the same for all contenders: a tensor or a tuple of tensors."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean training loss."""

    @abstractmethod
    def probe(self, window: int) -> Any:
        """A fresh held-out batch, neither train nor test."""

    @abstractmethod
    def example_losses(self, model: nn.Module, batch: Any) -> Tensor:
        """[B] losses of a held-out batch, free of training's penalties."""

    @abstractmethod
    def test_loss(self, model: nn.Module) -> float:
        """The mean loss on test data in eval mode. The harness alone calls it, once, at the end of a run."""


@dataclass(frozen=True)
class Task(ABC):
    """What contenders are compared on.

    Attributes:
        name: of its results. title: for people.
        steps, batch: of one plain training run, which is the budget.
        family: of optimizers; contenders that bring their own stay in it where they can.
        ignorance: the test loss of a model that learnt nothing; a run that ends above it has failed.
        grid: what is swept for the best fixed setting.
        starts: where runs begin, most of them relative to it.
        micro_batches: parts a batch is cut into by contenders that compare such parts.
        sub_batches: parts of a probe batch, whose scatter gives standard errors.
        clip: of the gradient's norm.
        shorter: how many times shorter a quick version is.
        development: whether settings of the library were chosen on it.
    """

    name: str
    title: str
    steps: int
    batch: int
    family: Literal["adamw", "sgd"]
    ignorance: float
    grid: Grid
    starts: tuple[Start, ...]
    micro_batches: int = 1
    sub_batches: int = 8
    clip: float | None = None
    shorter: int = 6
    development: bool = False

    betas: ClassVar[tuple[float, float]] = (0.9, 0.95)
    momentum: ClassVar[float] = 0.9

    @abstractmethod
    def problem(self, seed: int, dropout: float) -> Problem:
        """Data and model."""

    @property
    def budget(self) -> int:
        """Example-passes of one plain training run."""
        return self.steps * self.batch * 3

    def optimizer(self, groups: Sequence[dict[str, Any]], setting: Setting) -> Optimizer:
        """The optimizer of a plain training run."""
        if self.family == "adamw":
            return AdamW(list(groups), lr=setting.lr, betas=self.betas, weight_decay=setting.decay)
        return SGD(list(groups), lr=setting.lr, momentum=self.momentum, weight_decay=setting.decay)

    def rehearsed(self) -> Task:
        """One whose probes are as many and as large, to count them with; its model may be smaller."""
        return self

    def narrowed(self, factor: int) -> Task | None:
        """The same with a model so many times narrower; None where the model has no width to vary."""
        return None

    def quickened(self) -> Task:
        """A short version: fewer steps, starts and swept settings."""
        return replace(
            self,
            steps=max(1, self.steps // self.shorter),
            grid=self.grid.thinned(),
            starts=tuple(start for start in self.starts if start.name in QUICK),
        )


def named_groups(model: nn.Module, sort: Callable[[str, nn.Parameter], str]) -> list[dict[str, Any]]:
    """Parameter groups with the names that `sort` gives; what is one-dimensional does not decay."""
    found: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        own = sort(name, parameter)
        rest = {"weight_decay": 0.0} if own == "one-dimensional" else {}
        found.setdefault(own, {"name": own, "params": [], **rest})["params"].append(parameter)
    return list(found.values())


def split(batch: Any, parts: int) -> list[Any]:
    """A batch cut into equal parts.

    Raises:
        ValueError: it cannot be.

    >>> [part.tolist() for part in split(torch.arange(4), 2)]
    [[0, 1], [2, 3]]
    """
    if isinstance(batch, tuple):
        return list(zip(*(split(item, parts) for item in batch), strict=True))
    if len(batch) % parts:
        raise ValueError(f"a batch of {len(batch)} cannot be cut into {parts} equal parts")
    return list(torch.chunk(batch, parts))
