"""Weight decay leaves pretrained weights most of what they were before."""

from __future__ import annotations

from typing import Any, ClassVar

from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import SlopeRule
from hdet.controllers.pretrained import OfPretrained
from hdet.spec import register

# Moves that are smaller come of rounding, and would keep other rules from speaking.
_NEAR = 0.05


@register
class Spare(OfPretrained, SlopeRule):
    """In fine-tuning, lower a decay that would take too much of the weights if the run went on as in the window.

    What was learnt before fine-tuning lies in the weights, and decay takes it away slowly: no window sees that. What
    adapters learn is new, and has to outlast the run.

    >>> rule, window = Spare(), Context(length=10, total_steps=300)
    >>> pretrained = rule.begin(rule.start(), Estimate(slope=0.0, excess=1.3))
    >>> round(rule.propose(pretrained, Estimate(slope=0.0, stretch=0.03), window), 3)
    -1.519
    """

    overrules: ClassVar[bool] = True

    def propose(self, state: Any, estimate: Estimate, context: Context) -> float | None:
        room = self.room(state, estimate, context)
        return room if room is not None and room < -_NEAR else None
