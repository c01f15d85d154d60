"""Gradient descent with momentum on the slope."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from hdet.controllers.controller import Context, Controller
from hdet.controllers.estimate import Estimate
from hdet.spec import register


@dataclass(frozen=True)
class MomentumState:
    """Running mean of negated slopes."""

    velocity: float = 0.0


@register
class HeavyBall(Controller):
    """`v <- beta v + (1 - beta) (-slope)`, `move = rate v`: the paper's controller without its decay.

    Moves scale with the slope, so `rate` is in coordinates per unit of slope and wants choosing by the loss;
    `Gated` does not. It looks at no standard error.

    Args:
        beta: share of the velocity kept from window to window.
        rate: step size.

    >>> momentum = HeavyBall(beta=0.5, rate=0.5)
    >>> momentum.step(momentum.start(), Estimate(slope=-2.0), Context())
    (0.5, MomentumState(velocity=1.0))
    """

    kind: ClassVar[str] = "momentum"

    beta: float = Field(default=0.9, ge=0, lt=1, kw_only=False)
    rate: float = Field(default=0.5, gt=0, le=1000, kw_only=False)

    def start(self) -> MomentumState:
        return MomentumState()

    def step(self, state: MomentumState, estimate: Estimate, context: Context) -> tuple[float, MomentumState]:
        if not estimate.known:
            return 0.0, state
        state = MomentumState(self.beta * state.velocity - (1 - self.beta) * estimate.slope)
        return self.rate * state.velocity, state
