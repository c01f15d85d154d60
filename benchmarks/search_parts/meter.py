"""Compute, counted where it happens: at each call of a model, and when gradients reach its output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

DEFINITION = (
    "Compute is counted in example-passes, at the model: a forward pass of B examples counts B, a "
    "backward pass through them 2 B, whoever asks for it (training, probes, every replica, every trial "
    "of a search). A run's budget is steps x batch x 3, one plain training run; a contender that probes "
    "trains fewer steps, so that all it does fits the budget. Only the final evaluation on test data is "
    "free. Arithmetic on weights (optimizers, averages, merges) is not counted; the column of seconds "
    "shows it."
)


class Meter:
    """Counts example-passes of the models it watches.

    Attributes:
        forward: examples that went forward. backward: examples that gradients were computed for.

    >>> import torch
    >>> meter, model = Meter(), torch.nn.Linear(2, 1)
    >>> meter.watch(model)
    >>> model(torch.ones(5, 2)).sum().backward()
    >>> meter.forward, meter.backward, meter.passes
    (5, 5, 15)
    """

    def __init__(self) -> None:
        self.forward = 0
        self.backward = 0
        self._paused = False

    @property
    def passes(self) -> int:
        """forward + 2 backward."""
        return self.forward + 2 * self.backward

    def watch(self, model: nn.Module) -> None:
        """Count this model's passes from now on, and those of every deep copy made of it later.

        The examples of a pass are the first dimension of the model's first argument.
        """

        # A function, not a method: copy.deepcopy would give each copied model a meter of its own.
        def count(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            examples = len(inputs[0])
            self.add(forward=examples)
            if output.requires_grad:
                output.register_hook(lambda gradient: self.add(backward=examples))

        model.register_forward_hook(count)

    def add(self, *, forward: int = 0, backward: int = 0) -> None:
        """Charge passes."""
        if not self._paused:
            self.forward += forward
            self.backward += backward

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is counted inside the block: for the final test, which no contender may look at."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
