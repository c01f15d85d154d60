"""What the user set is information: to leave it upwards takes the more proof the further it goes."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field

from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import Veto
from hdet.spec import register


@register
class AboveGiven(Veto):
    """Above the schedule as given, raise only on `t < -significance (1 + s^2 shift / doubled_at)`.

    Early in training larger steps look better than they are, by an error that no standard error tells. Where a plateau
    shows little either way, each window would raise a rate that was set well. Where the rate is far too low, windows
    prove it many times over.

    A short run has few windows to prove it in, and a rate that is raised late costs it more than one that is somewhat
    too high. So s = min(1, total_steps / full_from) reduces what is asked for. Without a known end s is 1.

    Args:
        significance: |t| that is asked for at the schedule as given, and below it.
        doubled_at: shift at which twice as much is asked for in a long run; by default a factor of 3.
        full_from: steps of a run from which the proof is asked for in full; 0 asks for it in every run.

    >>> veto, proof = AboveGiven(), Estimate(slope=-3.0, stderr=1.0)
    >>> runs = [Context(shift=math.log(3.0), total_steps=steps) for steps in (100, 10_000)]
    >>> [veto.allow(0.5, veto.start(), proof, run) for run in runs]
    [0.5, 0.0]
    """

    significance: float = Field(default=2.0, gt=0, le=100)
    doubled_at: float = Field(default=math.log(3.0), gt=0)
    full_from: int = Field(default=1000, ge=0)

    def allow(self, move: float, state: Any, estimate: Estimate, context: Context) -> float:
        if move <= 0 or context.shift <= 0:
            return move
        steps = math.inf if context.total_steps is None else context.total_steps
        share = steps / self.full_from if steps < self.full_from else 1.0
        return move if estimate.t < -self.significance * (1.0 + share**2 * context.shift / self.doubled_at) else 0.0
