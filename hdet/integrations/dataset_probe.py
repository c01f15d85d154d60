"""A probe made of a data set: the sub-batches of each window, the same in every process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import Dataset

from hdet.errors import ConfigError
from hdet.replicas.generators import numbers_lent

SUB_BATCHES = 8
PROBE_TRAINS = (
    "the probe is the data that the model trains on: judged by these, dropout, label smoothing and weight decay look "
    "too high, and nothing shows what is overfitted; give the probe data that are held out"
)
"""What is warned of where a trainer was given one object for both."""


class Sample:
    """Sub-batches of equal size for each window: fresh ones of a data set with a length, the first of a stream.

    The examples of a window follow from its number, so that every process and a resume find the same.

    Args:
        data: examples by index, or an iterable of them.
        examples: how many a window's sub-batches hold together, at most.
        size: how many each holds; by default an eighth of `examples`.
        collate: a list of examples to a batch. What it draws from the generators of Python, NumPy and torch follows
            from the window too, and leaves these generators as they were.

    Raises:
        ConfigError: there are too few examples for 2 sub-batches.
    """

    def __init__(
        self,
        data: Sequence[Any] | Iterable[Any],
        examples: int,
        collate: Callable[[list[Any]], Any],
        size: int | None = None,
    ) -> None:
        self._collate = collate
        self._data: Any = data
        by_index = getattr(type(data), "__getitem__", Dataset.__getitem__) is not Dataset.__getitem__
        if not hasattr(data, "__len__") or not by_index:
            self._data = list(islice(data, max(examples, SUB_BATCHES * (size or 1))))
        held = len(self._data)
        self._size = size or max(1, min(examples, held) // SUB_BATCHES)
        self._sub_batches = min(SUB_BATCHES, held // self._size)
        if self._sub_batches < 2:
            raise ConfigError(
                f"the probe's data hold {held} examples, too few for 2 sub-batches of {self._size}; give at least "
                f"{2 * self._size}, better {SUB_BATCHES * self._size}"
            )

    def __call__(self, window: int) -> list[Any]:
        """The sub-batches of a window."""
        chosen = random.Random(f"hdet.probe:{window}").sample(range(len(self._data)), self._sub_batches * self._size)
        with numbers_lent(f"hdet.probe:{window}"):
            examples = [self._data[index] for index in chosen]
            return [
                self._collate(examples[start : start + self._size]) for start in range(0, len(examples), self._size)
            ]
