"""The objective: the training loss and training batches, for evidence that evaluates them apart from the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from hdet.errors import ConfigError, StepError
from hdet.replicas.tensors import made_anew
from hdet.signals.batches import drawn_batches, number_of, require_batches, shown
from hdet.signals.probe import real


@dataclass(frozen=True, repr=False)
class Objective:
    """What the training loop minimises, in a form that can be evaluated without it.

    It is evaluated in training mode, forward only, and the same batch several times with the same random numbers: of
    the global generators of torch, Python and NumPy, and of those that modules hold as attributes. All of them are left
    as they were.

    Args:
        loss: `loss(model, batch)`, the loss of one micro-batch that the loop calls `backward()` on, as a 0-dim tensor;
            dropout, label smoothing and auxiliary terms included.
        batches: J >= 2 training batches, a DataLoader of them, which is gone through whole in every window, or a
            function from the window's number to them. As many on every process; ranks may take their own, as they do in
            training, and the ranks of a tensor parallel model take the same. What a function draws at random is the
            same on every process: one that is to differ goes by its rank.
            Eight do well; the scatter over them gives the standard errors.

    >>> import torch
    >>> objective = Objective(lambda model, x: model(x).square().mean(), lambda window: [torch.ones(4, 2)] * 8)
    >>> len(objective.draw(window=0))
    8
    """

    loss: Callable[[Any, Any], Tensor]
    batches: Sequence[Any] | DataLoader[Any] | Callable[[int], Iterable[Any]]

    def __post_init__(self) -> None:
        if not callable(self.loss):
            raise ConfigError(f"loss must be callable as loss(model, batch), got {type(self.loss).__name__}")
        require_batches(self.batches, "an objective's")
        count = number_of(self.batches)
        if count is not None and count < 2:
            raise ConfigError(
                f"an objective needs at least 2 training batches, whose scatter is the standard error; got {count}; "
                f"split it, say in 8"
            )

    def __repr__(self) -> str:
        return shown(self, self.loss, self.batches)

    def draw(self, window: int) -> list[Any]:
        """The batches of a window.

        Raises:
            StepError: there are fewer than 2.
        """
        drawn = drawn_batches(self.batches, window, f"hdet.objective:{window}")
        if len(drawn) < 2:
            raise StepError(
                f"the objective has {len(drawn)} training batches in window {window} and needs at least 2 to know its "
                f"standard error; eight do well"
            )
        return drawn

    def evaluate(self, model: Any, batch: Any) -> Tensor:
        """The loss on one batch with the model as it is, 0-dim and detached.

        Raises:
            StepError: it is no scalar.
        """
        with made_anew():
            value = self.loss(model, batch)
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise StepError(f"the objective's loss must return one number, as the loop's own does; got {shape}")
        return real(value, "the objective's loss").detach().reshape(())
