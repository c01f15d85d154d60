"""Steps whose size is how sure one is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import Field

from hdet.controllers.controller import Context, Controller, settled
from hdet.controllers.estimate import Estimate
from hdet.spec import register

# No window is believed beyond this many standard errors. Residuals can vanish, and an infinite t would
# otherwise rule the discounted sum for ever.
_BELIEVABLE = 100.0


@dataclass(frozen=True)
class GatedState:
    """Discounted sum of t-statistics, and its variance were the knob to have no effect."""

    total: float = 0.0
    variance: float = 0.0


@register
class Gated(Controller):
    """Move against the slope once its t-statistic passes a gate, further the surer it is, never past `rate`.

        Z <- memory Z + t,   n <- memory^2 n + 1,   tau = Z / sqrt(n)
        move = -rate clip(tau / saturation, -1, 1)  if |tau| > gate, else 0

    A window of fewer than `full` steps moves by its share of that only, `rate length / full`: where windows grow,
    the first ones are short, noisy, and about a phase that soon is over.

    With `memory=0` tau is this window's t. With memory, windows that each prove little add up; tau keeps unit
    variance for a knob without effect. Only the sign and the certainty of the slope matter, never its
    scale, so one setting serves many losses.

    Args:
        rate: largest move, in coordinates.
        gate: |tau| below which the base holds.
        saturation: |tau| at which a move is as large as it gets.
        memory: share of the accumulated evidence kept from window to window.
        full: steps from which a window may move by the whole rate.
        raise_after: share of the run before which the base is not raised. Weights that have learnt nothing yet are
            best shrunk, which says nothing of the decay that suits them later; too much of it must go at once.
        settle: share of the run, at its end, over which moves fade to zero.

    Weight decay on a log coordinate takes `Gated(0.4, gate=2, raise_after=0.3)`; dropout on an arcsine
    coordinate `Gated(0.1, gate=1, saturation=2, memory=0.7, full=40, raise_after=0.3)`.

    >>> gated = Gated(0.5)
    >>> gated.step(gated.start(), Estimate(slope=0.2, stderr=0.1), Context())
    (-0.25, GatedState(total=2.0, variance=1.0))
    """

    rate: float = Field(default=0.5, gt=0, le=10, kw_only=False)
    gate: float = Field(default=1.0, ge=0, le=100)
    saturation: float = Field(default=4.0, gt=0, le=100)
    memory: float = Field(default=0.0, ge=0, lt=1)
    full: int = Field(default=1, ge=1)
    raise_after: float = Field(default=0.0, ge=0, le=1)
    settle: float = Field(default=0.0, ge=0, le=1)

    def start(self) -> GatedState:
        return GatedState()

    def step(self, state: GatedState, estimate: Estimate, context: Context) -> tuple[float, GatedState]:
        if not estimate.testable:
            return 0.0, state
        t = max(-_BELIEVABLE, min(_BELIEVABLE, estimate.t))
        state = GatedState(self.memory * state.total + t, self.memory**2 * state.variance + 1)
        tau = state.total / math.sqrt(state.variance)
        if abs(tau) <= self.gate:
            return 0.0, state
        rate = self.rate * min(1.0, context.length / self.full)
        early = context.total_steps is not None and context.step < self.raise_after * context.total_steps
        if early and tau < 0:
            return 0.0, state
        move = -rate * max(-1.0, min(1.0, tau / self.saturation))
        return settled(move, self.settle, context), state
