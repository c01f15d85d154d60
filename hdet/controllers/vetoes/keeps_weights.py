"""What `Spare` lowers is not raised again."""

from __future__ import annotations

from typing import Any

from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import Veto
from hdet.controllers.pretrained import OfPretrained
from hdet.spec import register


@register
class KeepsWeights(OfPretrained, Veto):
    """In fine-tuning, raise a decay no further than to where `Spare` would lower it.

    >>> veto, window = KeepsWeights(), Context(length=10, total_steps=300)
    >>> pretrained = veto.begin(veto.start(), Estimate(0.0, excess=1.3))
    >>> round(veto.allow(0.4, pretrained, Estimate(0.0, stretch=0.005), window), 3)
    0.285
    """

    def allow(self, move: float, state: Any, estimate: Estimate, context: Context) -> float:
        room = self.room(state, estimate, context)
        return move if room is None else min(move, max(0.0, room))
