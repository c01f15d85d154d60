"""Whether a loop clears its gradients: one that does not adds those of all steps up, and trains in silence."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.hparams.param_groups import first_trained
from hdet.replicas import tensors
from hdet.replicas.parallel import world
from hdet.user_warning import warn

KEPT = 5
"""Steps on end whose gradients were not cleared, before this is said."""
LOOKED_AT = 20
"""Steps after which a loop that has cleared its gradients in place is looked at no more."""


class KeptGradients:
    """Follows how often one gradient was written until it is seen cleared, which mostly the second step shows.

    Nothing is read from the device but one gradient, once, of a loop that seems to keep them: it may set them to zero
    where torch does not see it (`.data.zero_()`).

    Attributes:
        done: nothing is looked at any more.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._steps = self._kept = 0
        self._alike: bool | None = None  # each backward of this step added to what the one before had left
        self._left = -1  # how often it was written until the last backward or step
        self._full: Tensor | None = None  # whether it held anything as a step began
        self.done = False

    def before_backward(self) -> None:
        """A backward begins, and has not filled the gradient yet."""
        if self.done or not self._steps:
            return
        first = first_trained(self._optimizer)
        gradient = None if first is None else first.grad
        if gradient is None or gradient.layout != torch.strided or tensors.local(gradient) is not gradient:
            self.done = True
            return
        begins = self._alike is None
        self._alike = self._alike is not False and gradient._version == self._left
        if begins and self._alike and self._kept == KEPT - 1:
            self._full = gradient.any()  # read after the step: nothing is waited for, and nothing raised, in backward

    def after_backward(self) -> None:
        """A backward is over."""
        if self.done:
            return
        before, self._left = self._left, self._written()
        grown = self._left - before
        # A hook that clears it within the backward writes it too, as does what averages it over ranks.
        if self._alike and (grown < 1 or (grown > 1 and world() == 1)):
            self._alike = False

    def after_step(self) -> None:
        """The optimizer has stepped."""
        if self.done:
            return
        self._left = self._written()
        self._kept = self._kept + 1 if self._alike else 0
        self._alike = None
        self._steps += 1
        self.done = self._kept == KEPT or self._steps >= LOOKED_AT
        if self._kept == KEPT and bool(self._full):
            warn(
                f"the gradients of {KEPT} optimizer steps on end were not cleared, so each step was made with the "
                f"sum of those of all steps before it: call optimizer.zero_grad() in each step, before backward"
            )

    def _written(self) -> int:
        first = first_trained(self._optimizer)
        return -1 if first is None or first.grad is None else first.grad._version
