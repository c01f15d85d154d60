"""Late moves have little time to pay back what they cost."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from hdet.controllers.controller import Context, settled
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import Veto
from hdet.spec import register


@register
class Fade(Veto):
    """Fade moves linearly to zero over the last `settle` share of the run. A look ahead is not faded.

    >>> Fade(0.2).allow(0.4, Fade(0.2).start(), Estimate(slope=-1.0), Context(step=90, total_steps=100))
    0.2
    """

    settle: float = Field(default=0.2, ge=0, le=1, kw_only=False)

    def allow(self, move: float, state: Any, estimate: Estimate, context: Context) -> float:
        return move if estimate.offset > 0 else settled(move, self.settle, context)
