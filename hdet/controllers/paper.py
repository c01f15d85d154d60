"""The paper's controller, as intended."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from hdet.controllers.controller import Context, Controller
from hdet.controllers.estimate import Estimate
from hdet.errors import ConfigError
from hdet.spec import register


@dataclass(frozen=True)
class PaperState:
    """The controller's own base and velocity, in the knob's units, and the decay fixed when control began."""

    started: bool = False
    base: float = 0.0
    velocity: float = 0.0
    decay: float = 0.0


@register
class Paper(Controller):
    """Cheng, Huang, Zhu and Alonso 2026 (arXiv:2604.24708): momentum on the softmax displacement, and decay.

        Delta = -slope base,   v <- beta v + (1 - beta) Delta,   base <- base (1 - gamma) + rate v
        gamma = 1 - (base at the start of control / floor)^(-1/K),   K windows left at that moment

    For a knob in `Relative` space judged by the `Softmax` estimator. From the step at which control begins
    the base follows this recursion and not the schedule: every move is what takes the *schedule's* next value
    there, so give it a schedule that is flat after the warm-up, or the value still drifts within a window.

    gamma as printed in the paper is negative at OneCycle's defaults and would make the learning rate grow
    400-fold; this is the decay its text describes. It is never below 0. Nor does the velocity take the base
    below the floor: as printed it can make the rate negative.

    Args:
        floor: the value that the base decays to by the end of the run, in the knob's units.
        warmup_steps: steps before control begins.
        beta: share of the velocity kept from window to window.
        rate: weight of the velocity (the paper's lambda).

    Raises:
        ConfigError: control begins in a run of unknown length.

    >>> paper = Paper(floor=0.25, rate=0.5, beta=0.0)
    >>> paper.step(paper.start(), Estimate(slope=-0.125), Context(windows_left=2))
    (-0.4375, PaperState(started=True, base=0.5625, velocity=0.125, decay=0.5))
    """

    floor: float = Field(gt=0, kw_only=False)
    warmup_steps: int = Field(default=0, ge=0)
    beta: float = Field(default=0.9, ge=0, lt=1)
    rate: float = Field(default=0.5, gt=0, le=1000)

    def start(self) -> PaperState:
        return PaperState()

    def step(self, state: PaperState, estimate: Estimate, context: Context) -> tuple[float, PaperState]:
        if context.step < self.warmup_steps or not estimate.known or context.schedule_next <= 0:
            return 0.0, state
        if not state.started:
            state = self._begin(context)
        velocity = self.beta * state.velocity - (1 - self.beta) * estimate.slope * state.base
        base = state.base * (1 - state.decay) + self.rate * velocity
        # The velocity remembers displacements of a base that has decayed since, and could take it below zero.
        base = max(base, min(self.floor, state.base))
        # The engine would stop the shift at its authority: stop here too, or the recursion runs away from it.
        shift = max(-context.authority, min(context.authority, base / context.schedule_next - 1))
        base = context.schedule_next * (1 + shift)
        return shift - context.shift, PaperState(True, base, velocity, state.decay)

    def _begin(self, context: Context) -> PaperState:
        if context.windows_left is None:
            raise ConfigError(
                "Paper decays its base to a floor by the end of the run, and this run has no known end; "
                "give the engine total_steps (or a schedule that has them), or use HeavyBall"
            )
        ratio = max(context.base / self.floor, 1.0)
        decay = 1 - ratio ** (-1 / max(context.windows_left, 1))
        return PaperState(started=True, base=context.base, decay=decay)
