"""Moves whose size grows with the certainty of the slope."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pydantic import Field

from hdet.controllers.controller import Context, Controller, settled
from hdet.controllers.estimate import Estimate
from hdet.spec import register
from hdet.sub_batches import accumulated, student

# The largest |t| that a window can have. Residuals can vanish, and an infinite t would dominate the discounted
# sum for ever.
_BELIEVABLE = 100.0


@dataclass(frozen=True)
class Sums:
    """Discounted sum of evidence, and its variance for a knob without effect.

    Attributes:
        sums: the sum of each sub-batch, where estimates have sub-batches; their scatter then replaces the variance.
    """

    total: float = 0.0
    variance: float = 0.0
    sums: tuple[float, ...] = ()

    @property
    def tau(self) -> float:
        """The sum over its standard error, clipped to +-100."""
        return clipped(student(self.sums)) if self.sums else believable(self.total, math.sqrt(self.variance))


@dataclass(frozen=True)
class GatedState(Sums):
    """The sum, and how the run began.

    Attributes:
        pretrained: whether it began with weights that had been trained; not where nobody knows.
    """

    pretrained: bool = False


def believable(total: float, error: float) -> float:
    """A sum over its standard error, clipped to +-100: errors can vanish."""
    if total == 0.0:
        return 0.0
    return clipped(total / error if error > 0 else math.copysign(math.inf, total))


def clipped(t: float) -> float:
    """A t-statistic, clipped to +-100."""
    return max(-_BELIEVABLE, min(_BELIEVABLE, t))


def window_share(window_steps: int | None, context: Context) -> float:
    """The closed window's length as a share of `window_steps`; 1 where any length counts as one window."""
    return 1.0 if window_steps is None else context.length / window_steps


def gated_move(tau: float, rate: float, gate: float, saturation: float, scale: float, boost: float = 1.0) -> float:
    """`-rate scale clip(x max(1, |x|), -boost, boost)` with x = tau / saturation if |tau| > gate, else 0."""
    x = tau / saturation
    return -rate * scale * max(-boost, min(boost, x * max(1.0, abs(x)))) if abs(tau) > gate else 0.0


@register
class Gated(Controller):
    """Move against the slope once its t-statistic passes a gate; the move grows with |t|, up to `rate`.

        Z_j <- memory Z_j + b_j,   tau = mean(Z) / (sd(Z) / sqrt(J))
        move = -rate clip(tau / saturation, -1, 1)  if |tau| > gate, else 0

    where b_j is the slope in sub-batch j (`Estimate.slopes`), and tau, a Student t with J - 1 degrees of freedom, is
    taken as the normal deviate of the same probability. So gates do not depend on J, nor on whether the probe is fixed.
    Estimates without sub-batches are summed as independent ones: `Z <- memory Z + z`, `n <- memory^2 n + 1`,
    `tau = Z / sqrt(n)`, z the normal deviate for t by `Estimate.freedom`. Only the sign and the certainty of the slope
    matter, so one setting serves many losses.

    With `window_steps`, a window of that many steps moves by at most `rate` and keeps `memory`. For a window of another
    length, share is its length over `window_steps`. It moves by at most `rate * min(share, max_scale)` and keeps
    `memory ** share`. Growing windows need this: the first ones are short and noisy, and tell of a phase that is soon
    over; the last ones are few.

    With `run_steps`, a run of fewer steps moves by more where evidence leaves no doubt, since it has no time: beyond
    the saturation by `rate (tau / saturation)^2`, up to min(run_steps / total_steps, max_boost) times `rate`.

    Of a pretrained model (`Estimate.pretrained`) every move is `pretrained_boost` times as large: fine-tuning is short.
    One that would end within `pretrained_reach` of the lower bound goes there: what explores beside a bound trains with
    levels that are further from it than the base.

    Args:
        rate: largest move, in coordinates.
        gate: |tau| below which the base holds.
        saturation: |tau| from which on a move has its full size.
        memory: share of the accumulated evidence kept from window to window.
        window_steps: window length, in steps, for which `rate` and `memory` are given; None for any length.
        max_scale: largest share, so the largest move of a long window in units of `rate`.
        run_steps: steps of a run from which on no move is larger than `rate`; None for any length.
        max_boost: how many times larger a shorter run makes it at most.
        pretrained_boost: how many times larger a move is where the run's first weights had been trained.
        pretrained_reach: how near to the lower bound a move down does not end there, in coordinates.
        until: share of the run after which the base holds and no evidence is gathered: the rest cannot pay it back.
        settle: share of the run, at its end, in which moves fade to zero.

    `Knob.default_controller` has the numbers that weight decay and the knobs of the forward pass use by default.

    >>> gated = Gated(0.5)
    >>> gated.step(gated.start(), Estimate(slope=0.2, stderr=0.1), Context())
    (-0.25, GatedState(total=2.0, variance=1.0, sums=(), pretrained=False))
    """

    rate: float = Field(default=0.5, gt=0, le=10, kw_only=False)
    gate: float = Field(default=1.0, ge=0, le=100)
    saturation: float = Field(default=4.0, gt=0, le=100)
    memory: float = Field(default=0.0, ge=0, lt=1)
    window_steps: int | None = Field(default=None, ge=1)
    max_scale: float = Field(default=3.0, gt=0, le=100)
    run_steps: int | None = Field(default=None, ge=1)
    max_boost: float = Field(default=3.0, ge=1, le=100)
    pretrained_boost: float = Field(default=1.0, ge=1, le=100)
    pretrained_reach: float = Field(default=0.0, ge=0, le=10)
    until: float = Field(default=1.0, gt=0, le=1)
    settle: float = Field(default=0.0, ge=0, le=1)

    def listens(self, step: int, total_steps: int | None) -> bool:
        return total_steps is None or step < self.until * total_steps

    def start(self) -> GatedState:
        return GatedState()

    def step(self, state: GatedState, estimate: Estimate, context: Context) -> tuple[float, GatedState]:
        state = replace(state, pretrained=state.pretrained or bool(estimate.pretrained))
        if not estimate.testable or not self.listens(context.step, context.total_steps):
            return 0.0, state
        share = window_share(self.window_steps, context)
        state = self._gathered(state, estimate, share)
        scale, boost = min(share, self.max_scale), self._boost(context.total_steps)
        rate = self.rate * (self.pretrained_boost if state.pretrained else 1.0)
        move = gated_move(state.tau, rate, self.gate, self.saturation, scale, boost)
        if state.pretrained and move < 0.0 and context.down + move < self.pretrained_reach:
            move = -context.down - self.pretrained_reach  # beyond it, so that rounding leaves nothing
        return settled(move, self.settle, context), state

    def retreat(self, state: GatedState, context: Context, worked: float) -> tuple[float, GatedState]:
        return 0.0, GatedState(pretrained=state.pretrained)

    def restart(self, state: GatedState, context: Context) -> tuple[float, GatedState]:
        return 0.0, GatedState(pretrained=state.pretrained)

    def _boost(self, total_steps: int | None) -> float:
        if self.run_steps is None or total_steps is None:
            return 1.0
        return min(max(self.run_steps / total_steps, 1.0), self.max_boost)

    def _gathered(self, state: GatedState, estimate: Estimate, share: float) -> GatedState:
        """The state with a window's evidence added."""
        kept = self.memory**share
        if estimate.has_sub_batches:
            return GatedState(sums=accumulated(state.sums, estimate.slopes, kept), pretrained=state.pretrained)
        t = believable(estimate.slope, estimate.normal_stderr)
        return GatedState(kept * state.total + t, kept**2 * state.variance + 1, pretrained=state.pretrained)
