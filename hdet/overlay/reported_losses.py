"""The training losses of a step as the loop lets hdet see them, and the scale they are on."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hdet.user_warning import warn

FAR = 5.0
"""A factor by which a first training loss and the held-out loss of the same weights do not differ by chance."""

NEAR = 1.5
"""Factor within which two losses at the same weights are on one scale for sure."""


class ReportedLosses:
    """One loss a pass, detached; and, until the scale is known, what backward multiplied each by.

    Attributes:
        divided: whether each loss that is reported was divided by the number of micro-batches beforehand.
        seen: whether any loss was ever reported.
        known: whether the scale of the losses has been found out.
        agree: what stands for a loss that is reported; the loss itself, unless others train the same model.
    """

    def __init__(self) -> None:
        self.agree: Callable[[Tensor], Tensor] = torch.detach
        self.divided = False
        self.seen = False
        self.known = False
        self._losses: dict[int, Tensor] = {}
        self._weights: dict[int, Tensor] = {}

    def note(self, number: int, loss: Tensor) -> None:
        """The loss of a pass, by its number in the step. One of each example, under `torch.func.vmap`, is none."""
        if _of_each_example(loss):
            return
        self.seen = True
        self._losses[number] = self.agree(loss.detach().clone())  # the loop may go on with it in place
        if not self.known and loss.requires_grad:
            loss.register_hook(partial(self._weights.__setitem__, number))

    def drop(self, number: int) -> None:
        """There was no such pass."""
        self._losses.pop(number, None)
        self._weights.pop(number, None)

    def keep_as_first(self, number: int) -> None:
        """Those of one pass alone are left, which has become the first of the step."""
        self._losses = {0: self._losses[number]} if number in self._losses else {}
        self._weights = {0: self._weights[number]} if number in self._weights else {}

    def clear(self) -> None:
        """The step is over."""
        self._losses, self._weights = {}, {}

    def of(self, seats: int, passes: int) -> list[Tensor] | None:
        """[seats] mean losses; a seat without one is given the mean of the others. None where none can be told.

        Args:
            passes: micro-batches of this process in the step. Where losses come divided and their number is not the
                usual one, nobody knows whether a loss was divided by the one number or by the other.
        """
        if not self._losses or (self.divided and passes != seats):
            return None
        mean = torch.stack([loss.reshape(()) for loss in self._losses.values()]).mean()
        losses = [self._losses.get(seat, mean) for seat in range(seats)]
        return [loss * float(seats) for loss in losses] if self.divided else losses

    @property
    def unsure(self) -> bool:
        """Whether the scale of the losses that were reported has still to be found out."""
        return bool(self._losses) and not self.known

    def mean(self) -> Tensor:
        """The mean of the losses reported in this step, 0-dim."""
        return torch.stack([loss.reshape(()).double() for loss in self._losses.values()]).mean()

    def judge(self, reported: float, held_out: float, passes: int) -> None:
        """Find out the scale, once, from the first losses and the held-out loss at the same weights.

        Losses that are not finite, as where a loss scale is still too large, leave it to the next step.

        Args:
            reported: the mean over passes and processes.
            passes: micro-batches of this process in the step.
        """
        self.known = math.isfinite(reported)
        if not (0.0 < reported < math.inf and 0.0 < held_out < math.inf):
            return
        off = math.log(reported / held_out)
        left = abs(off + math.log(passes))  # of the difference, if the loss was divided
        self.divided = passes > 1 and left < min(abs(off), math.log(NEAR))
        multiplied = self._multiplied(passes)
        if max(left, abs(off)) < math.log(NEAR) and math.isclose(multiplied, 1.0, rel_tol=0.02):
            self.divided = False  # of two passes either may be so; it was not divided before, if it is by backward
        if abs(off + (math.log(passes) if self.divided else 0.0)) > math.log(FAR):
            warn(
                f"the first training loss is {reported:.4g} where the probe's loss at the same weights is "
                f"{held_out:.4g}; rules that compare the two (weight decay, dropout at 0) are misled where they are on "
                f"different scales: give search.loss(...) the mean over the micro-batch, of the same loss; "
                f"and a probe's loss is the lower the better, unlike an accuracy"
            )
        divided_twice = math.isclose(multiplied * (1 if self.divided else passes), 1.0, rel_tol=0.02)
        if passes > 1 and min(left, abs(off)) < math.log(NEAR) and divided_twice:
            warn(
                f"the losses of {passes} micro-batches are divided by {passes} twice before backward, so that the "
                f"gradient is {passes} times too small; divide once, or let the trainer do it"
            )

    def _multiplied(self, passes: int) -> float:
        """What backward multiplied the losses by after they were reported, summed; NaN where a pass is not known."""
        weights = [float(weight) for weight in self._weights.values()]
        return sum(weights) if len(weights) == passes else math.nan

    def state_dict(self) -> dict[str, Any]:
        return {"divided": self.divided, "seen": self.seen, "known": self.known}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.divided, self.seen, self.known = state["divided"], state["seen"], state["known"]


def _of_each_example(loss: Tensor) -> bool:
    """Whether a tensor stands for many, one of each example: it cannot be read after `torch.func.vmap`."""
    from torch._C import _functorch as functorch  # torch has no public way to ask

    level: Tensor = loss
    while functorch.is_functorch_wrapped_tensor(level):
        if functorch.is_batchedtensor(level):
            return True
        level = functorch.get_unwrapped(level)
    return False
