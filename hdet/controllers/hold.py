"""No control."""

from __future__ import annotations

from hdet.controllers.controller import Context, Controller
from hdet.controllers.estimate import Estimate
from hdet.controllers.state import NoState
from hdet.spec import register


@register
class Hold(Controller):
    """Explore and record, but never move: the control group of an ablation.

    >>> Hold().step(NoState(), Estimate(slope=9.0, stderr=1.0), Context())
    (0.0, NoState())
    """

    def start(self) -> NoState:
        return NoState()

    def step(self, state: NoState, estimate: Estimate, context: Context) -> tuple[float, NoState]:
        return 0.0, state
