"""Adam on the slope."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import Field

from hdet.controllers.controller import Context, Controller, settled
from hdet.controllers.estimate import Estimate
from hdet.spec import register


@dataclass(frozen=True)
class AdamState:
    """Running means of the slope and its square, over so many windows."""

    mean: float = 0.0
    square: float = 0.0
    windows: int = 0


@register
class Adam(Controller):
    """`move = -rate m / (sqrt(v) + eps)`, with m and v the debiased running means of the slope and its square.

    Kingma and Ba 2015, arXiv 1412.6980, the step of evolution strategies (Salimans et al. 2017). A move is at most
    about `rate`, whatever the slope's scale. It looks at no standard error: a knob without effect wanders.

    Args:
        rate: step size, in coordinates.
        beta1, beta2: shares of m and v kept from window to window.
        eps: what keeps the step small where slopes are next to nothing.
        settle: share of the run, at its end, over which moves fade to zero.

    >>> adam = Adam(0.1, eps=0.0)
    >>> move, state = adam.step(adam.start(), Estimate(slope=-2.0), Context())
    >>> round(move, 6), state.windows
    (0.1, 1)
    """

    rate: float = Field(default=0.05, gt=0, le=10, kw_only=False)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)
    eps: float = Field(default=1e-8, ge=0)
    settle: float = Field(default=0.0, ge=0, le=1)

    def start(self) -> AdamState:
        return AdamState()

    def step(self, state: AdamState, estimate: Estimate, context: Context) -> tuple[float, AdamState]:
        # A slope whose square is no number cannot be scaled by it.
        if not estimate.known or not math.isfinite(estimate.slope * estimate.slope):
            return 0.0, state
        windows = state.windows + 1
        mean = self.beta1 * state.mean + (1 - self.beta1) * estimate.slope
        square = self.beta2 * state.square + (1 - self.beta2) * estimate.slope**2
        size = math.sqrt(square / (1 - self.beta2**windows)) + self.eps
        move = -self.rate * mean / (1 - self.beta1**windows) / size if size > 0 else 0.0
        return settled(move, self.settle, context), AdamState(mean, square, windows)
