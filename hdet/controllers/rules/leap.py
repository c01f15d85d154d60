"""A knob too weak to have an effect is raised to where it would have one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from hdet.controllers.beginning import KnowsPretrained
from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.rules.slope_sum import SlopeSum, SlopeSumState
from hdet.spec import register


@dataclass(frozen=True)
class LeapState(SlopeSumState):
    """The sum of slopes, and whether the run's first weights had been trained."""

    pretrained: bool = False


@register
class Leap(KnowsPretrained, SlopeSum):
    """Where `SlopeSum` raises a knob too weak to have an effect, raise it at once to where it would have one.

    A slope in log space grows with the value, as long as weights decay less than once in a window. So a knob whose
    |slope| is a share of `min_effect` times the level (`Estimate.level`) is raised by the factor that is missing, and
    by `max_scale` rates at the most. It speaks only where that is further than `SlopeSum` would go, not of a level that
    is not finite, and never in fine-tuning (`Estimate.pretrained`): no window sees what decay takes away of what was
    learnt before.

    Args:
        gate: |tau| that a leap takes; higher than that of a step.
        min_effect: |slope| as a share of the level from which a knob has an effect; 0 never leaps.
    """

    gate: float = Field(default=2.0, ge=0, le=100)
    min_effect: float = Field(default=1e-2, ge=0)

    def start(self) -> LeapState:
        return LeapState()

    def propose(self, state: Any, estimate: Estimate, context: Context) -> float | None:
        if state.pretrained or not math.isfinite(estimate.level or 0.0):
            return None
        move = super().propose(state, estimate, context)
        share = estimate.relative_slope / self.min_effect if self.min_effect > 0 else 1.0
        if move is None or move <= 0:
            return None
        furthest = self.rate * self.max_scale
        leap = min(-math.log(share), furthest) if share > 0 else furthest
        return leap if leap > move else None
