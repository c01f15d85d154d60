"""Weights that have learnt nothing yet are best shrunk, which says nothing of the decay that suits them later."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import Veto
from hdet.spec import register


@register
class NotEarly(Veto):
    """Before the share `raise_after` of the run, raise nothing above the schedule as given (a shift of 0).

    In a run without a known end it forbids nothing.

    Args:
        raise_after: share of the run from which it forbids nothing.
        back_after: share from which a base that was lowered may come back as far as to the schedule as given; 1 holds
            it until `raise_after`.
        back_steps: steps before which it does not come back either, so that runs shorter than
            `back_steps / raise_after` wait for `raise_after`.

    >>> veto, calls_for_more = NotEarly(), Estimate(slope=-0.1)
    >>> shifts = {"as given": 0.0, "lowered": -0.04}
    >>> early = {name: Context(step=2900, total_steps=10_000, shift=shift) for name, shift in shifts.items()}
    >>> {name: veto.allow(0.1, veto.start(), calls_for_more, context) for name, context in early.items()}
    {'as given': 0.0, 'lowered': 0.04}
    """

    raise_after: float = Field(default=0.3, ge=0, le=1)
    back_after: float = Field(default=0.075, ge=0, le=1)
    back_steps: int = Field(default=1000, ge=0)

    def allow(self, move: float, state: Any, estimate: Estimate, context: Context) -> float:
        if move <= 0 or not context.before(self.raise_after):
            return move
        if context.before(self.back_after) or context.step < self.back_steps:
            return 0.0
        return min(move, max(0.0, -context.shift))
