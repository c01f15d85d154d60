"""Go where the parabola has its bottom."""

from __future__ import annotations

import math

from pydantic import Field

from hdet.controllers.controller import Context, Controller, settled
from hdet.controllers.estimate import Estimate
from hdet.controllers.state import NoState
from hdet.spec import register


def newton_move(estimate: Estimate, limit: float) -> float:
    """`clip(-slope / curvature, -limit, limit)`; `-limit sign(slope)` without a positive curvature.

    >>> newton_move(Estimate(slope=-0.2, curvature=1.0), 0.5), newton_move(Estimate(slope=-0.2), 0.5)
    (0.2, 0.5)
    """
    slope, curvature = estimate.slope, estimate.curvature
    if slope == 0 or not math.isfinite(slope):
        return 0.0
    # The comparison is also false for NaN, and spares the division where its result would be clipped.
    if curvature is not None and curvature * limit > abs(slope):
        return -slope / curvature
    return math.copysign(limit, -slope)


@register
class Newton(Controller):
    """Move to the bottom of the fitted parabola, no further than `limit`, if the slope passes a gate.

    Made for `hdet.contrib.Kalman`, whose curvature is a memory of many windows, and `LeastSquares(curvature=True)`. An
    estimate without a positive curvature is followed downhill by the whole limit.

    Args:
        limit: largest move, in coordinates; None for how far from the base the window looked (`Estimate.span`, else
            `Context.spread`), beyond which the parabola has not been seen.
        gate: |t| of the slope below which the base holds.
        settle: share of the run, at its end, over which moves fade to zero.

    >>> Newton(limit=0.5).step(NoState(), Estimate(slope=0.2, curvature=1.0, stderr=0.1), Context())
    (-0.2, NoState())
    """

    limit: float | None = Field(default=None, gt=0, le=10, kw_only=False)
    gate: float = Field(default=1.0, ge=0, le=100)
    settle: float = Field(default=0.0, ge=0, le=1)

    def start(self) -> NoState:
        return NoState()

    def step(self, state: NoState, estimate: Estimate, context: Context) -> tuple[float, NoState]:
        if not estimate.testable or abs(estimate.t_of_eight) <= self.gate:
            return 0.0, state
        looked = context.spread if estimate.span is None else estimate.span
        limit = looked if self.limit is None else self.limit
        return settled(newton_move(estimate, limit), self.settle, context), state
