"""Steps that are small beside the weights are not made smaller while an untrained model warms up."""

from __future__ import annotations

from hdet.controllers.beginning import HarmlessState, OfHarmlessSteps
from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import Veto
from hdet.spec import register


@register
class SmallSteps(OfHarmlessSteps, Veto):
    """While an untrained model warms up, lower no rate below where its steps are small.

    It is silent once a line has shown that such steps wreck the network.

    >>> veto, less = SmallSteps(), Estimate(slope=0.3, stderr=0.1, level=3.0, step_size=2.0)
    >>> begun = veto.begin(veto.start(), Estimate(slope=0.0, excess=1.0))
    >>> round(veto.allow(-1.0, begun, less, Context()), 3)  # to half of it
    -0.693
    """

    def allow(self, move: float, state: HarmlessState, estimate: Estimate, context: Context) -> float:
        room = self.room(state, estimate, context)
        return move if room is None else max(move, min(0.0, room))
