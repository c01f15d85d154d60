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

    With `full`, `rate` and `memory` are for windows of that many steps, and others have their share: they move by
    `rate length / full`, but not by more than `most` rates, and forget to `memory ** (length / full)`. Where windows
    grow, the first ones are short, noisy, and about a phase that soon is over, and the last ones are few.

    With `memory=0` tau is this window's t. With memory, windows that each prove little add up; tau keeps unit
    variance for a knob without effect. Only the sign and the certainty of the slope matter, never its
    scale, so one setting serves many losses.

    Args:
        rate: largest move, in coordinates.
        gate: |tau| below which the base holds.
        saturation: |tau| at which a move is as large as it gets.
        memory: share of the accumulated evidence kept from window to window.
        full: steps of a window that `rate` is meant for; None for any window.
        most: rates that a longer window may move by.
        raise_after: share of the run before which the base is not raised. Weights that have learnt nothing yet are
            best shrunk, which says nothing of the decay that suits them later; too much of it must go at once.
        until: share of the run after which the base holds and nothing is gathered: what is left cannot pay it back.
        worthwhile: the least |slope|, as a share of `Estimate.level`, for which the base is lowered. Below it the knob
            is too weak to do harm. Without effect where the evidence tells no level; so is `felt`.
        felt: the |slope|, as a share of the level, below which a knob that more is called for, by `leap_gate`, is too
            weak to do good: it goes up to where it would be felt (a slope in log space grows with the value), by
            `most` rates at the most.
        leap_gate: |tau| from which it does.
        settle: share of the run, at its end, over which moves fade to zero.

    What weight decay and the knobs of the forward pass take by default is in `hdet.evidence.defaults`.

    >>> gated = Gated(0.5)
    >>> gated.step(gated.start(), Estimate(slope=0.2, stderr=0.1), Context())
    (-0.25, GatedState(total=2.0, variance=1.0))
    """

    rate: float = Field(default=0.5, gt=0, le=10, kw_only=False)
    gate: float = Field(default=1.0, ge=0, le=100)
    saturation: float = Field(default=4.0, gt=0, le=100)
    memory: float = Field(default=0.0, ge=0, lt=1)
    full: int | None = Field(default=None, ge=1)
    most: float = Field(default=3.0, gt=0, le=100)
    raise_after: float = Field(default=0.0, ge=0, le=1)
    until: float = Field(default=1.0, gt=0, le=1)
    worthwhile: float = Field(default=0.0, ge=0)
    felt: float = Field(default=0.0, ge=0)
    leap_gate: float = Field(default=2.0, ge=0, le=100)
    settle: float = Field(default=0.0, ge=0, le=1)

    def listens(self, step: int, total_steps: int | None) -> bool:
        return total_steps is None or step < self.until * total_steps

    def start(self) -> GatedState:
        return GatedState()

    def step(self, state: GatedState, estimate: Estimate, context: Context) -> tuple[float, GatedState]:
        if not estimate.testable or not self.listens(context.step, context.total_steps):
            return 0.0, state
        t = max(-_BELIEVABLE, min(_BELIEVABLE, estimate.t))
        share = 1.0 if self.full is None else context.length / self.full
        kept = self.memory**share
        state = GatedState(kept * state.total + t, kept**2 * state.variance + 1)
        tau = state.total / math.sqrt(state.variance)
        if abs(tau) <= self.gate:
            return 0.0, state
        rate = self.rate * min(share, self.most)
        early = context.total_steps is not None and context.step < self.raise_after * context.total_steps
        if early and tau < 0:
            return 0.0, state
        move = -rate * max(-1.0, min(1.0, tau / self.saturation))
        if estimate.level:
            relative = abs(estimate.slope / estimate.level)
            if move < 0 and relative < self.worthwhile:
                move = 0.0
            elif tau < -self.leap_gate and relative < self.felt:
                move = max(move, self._leap(relative / self.felt))
        return settled(move, self.settle, context), state

    def _leap(self, share: float) -> float:
        """Up to where the slope would be 1 / share of what it is, as far as one move may go."""
        furthest = self.rate * self.most
        return min(-math.log(share), furthest) if share > 0 else furthest
