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
    """Raise nothing before the share `raise_after` of the run. A run without a known end has no share.

    >>> NotEarly().allow(0.1, NotEarly().start(), Estimate(slope=-0.1), Context(step=29, total_steps=100))
    0.0
    """

    raise_after: float = Field(default=0.3, ge=0, le=1)

    def allow(self, move: float, state: Any, estimate: Estimate, context: Context) -> float:
        early = context.total_steps is not None and context.step < self.raise_after * context.total_steps
        return 0.0 if move > 0 and early else move
