"""Whether a loop clears its gradients: one that does not adds those of all steps up, and trains in silence."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from hdet.hparams.param_groups import first_trained
from hdet.replicas import tensors
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
        self._left = self._stepped = -1  # how often it was written until the last backward or step, and the last step
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
        self._alike = self._alike is not False and gradient._version == self._left
        if self._alike and self._kept == KEPT - 1:
            self.done = True
            if bool(gradient.any()):
                warn(
                    f"the gradients of {KEPT} optimizer steps on end were not cleared, so each step was made with the "
                    f"sum of those of all steps before it: call optimizer.zero_grad() in each step, before backward"
                )

    def after_backward(self) -> None:
        """A backward is over."""
        if not self.done:
            self._left = self._written()

    def after_step(self) -> None:
        """The optimizer has stepped."""
        if self.done:
            return
        self._left = self._written()
        grew = self._left > self._stepped
        self._kept = self._kept + 1 if self._alike and grew else 0
        self._alike, self._stepped = None, self._left
        self._steps += 1
        self.done = self._steps >= LOOKED_AT

    def _written(self) -> int:
        first = first_trained(self._optimizer)
        return -1 if first is None or first.grad is None else first.grad._version
