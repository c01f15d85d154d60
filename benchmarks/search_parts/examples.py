"""Examples that were generated once and are drawn with replacement, as several tasks share them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hdet.app.tasks.draws import draws
from hdet.replicas.tensors import evaluating
from search_parts.task import Problem, Task

Examples = tuple[Tensor, ...]


def built(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    """A model whose first weights follow a seed; torch's own generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


class DrawnProblem(Problem):
    """Columns of the splits `train`, `probe` and `test`, in batches that follow a seed; a probe is as large as a batch.

    A task says what the splits are, what the network of a dropout rate (and a width) is, and what each example loses.
    """

    splits: ClassVar[Callable[[], Mapping[str, Examples]]]
    network: ClassVar[type[nn.Module]]

    def __init__(self, *, seed: int, batch: int, dropout: float, width: int | None) -> None:
        self.seed, self.size, self.rate = seed, batch, dropout
        self.sizes: tuple[int, ...] = () if width is None else (width,)

    def model(self) -> nn.Module:
        return built(self.seed, lambda: self.network(self.rate, *self.sizes))

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        parameters = list(model.parameters())
        return [
            {"name": "matrices", "params": [p for p in parameters if p.dim() >= 2]},
            {"name": "vectors", "params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]

    def batch(self, step: int) -> Examples:
        return self._drawn("train", self.size, step)

    def loss(self, model: nn.Module, batch: Examples) -> Tensor:
        return self.example_losses(model, batch).mean()

    def probe(self, window: int) -> Examples:
        return self._drawn("probe", self.size, window)

    def test_loss(self, model: nn.Module) -> float:
        with evaluating(model), torch.no_grad():
            return float(self.loss(model, type(self).splits()["test"]))

    def _drawn(self, split: str, count: int, step: int) -> Examples:
        columns = type(self).splits()[split]
        rows = torch.from_numpy(draws(count, below=len(columns[0]), seed=self.seed, stream=split, step=step))
        return tuple(column[rows] for column in columns)


class FreshProblem(DrawnProblem):
    """Examples that are drawn anew in every step."""

    tests: ClassVar[int] = 2000

    @staticmethod
    @abstractmethod
    def drawn(count: int, seed: int, stream: str, step: int) -> Examples:
        """That many, a pure function of the arguments."""

    def batch(self, step: int) -> Examples:
        return type(self).drawn(self.size, self.seed, "train", step)

    def probe(self, window: int) -> Examples:
        return type(self).drawn(self.size, self.seed, "probe", window)

    @classmethod
    def splits(cls) -> dict[str, Examples]:
        return {"test": cls.drawn(cls.tests, 0, "test", 0)}


@dataclass(frozen=True, kw_only=True)
class DrawnTask(Task):
    """A task whose examples are drawn.

    Attributes:
        problems: by seed and dropout rate.
        width: of the network, where it can be had in several.
    """

    problems: type[DrawnProblem]
    width: int | None = None

    def narrowed(self, factor: int) -> DrawnTask | None:
        return None if self.width is None else replace(self, width=self.width // factor)

    def problem(self, seed: int, dropout: float) -> DrawnProblem:
        return self.problems(seed=seed, batch=self.batch, dropout=dropout, width=self.width)
