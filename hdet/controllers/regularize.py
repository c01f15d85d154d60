"""How strongly the weights are held back: gated steps, and what is known of evidence that speaks too soon."""

from __future__ import annotations

import math

from pydantic import Field

from hdet.controllers.controller import Context, settled
from hdet.controllers.estimate import Estimate
from hdet.controllers.gated import Gated, GatedState, believable
from hdet.spec import register


@register
class Regularize(Gated):
    """`Gated` for weight decay judged by `Analytic` evidence; for a knob in `Log` space.

    What decay did to the weights, and nothing of how gradients answer, is what that evidence sees: it speaks of the
    next steps where decay acts on the whole run. Three things are therefore asked besides tau (see `Gated`):

    - Nothing is raised in the first `raise_after` of the run. Weights that have learnt nothing yet are best shrunk,
      which says nothing of the decay that suits them later.
    - Nothing is lowered while held-out loss is above training loss by the share `gap` of itself. Less decay always
      fits better now; what it is there for shows later, on a model that fits too well already.
    - Nothing is raised by more than `beyond` times what was measured (`Estimate.span`): where weights decay many
      times over within a window, only a small change of it was.

    And a knob that hardly acts tells little, whichever way it points:

    - Below a |slope| of `worthwhile` times the level (`Estimate.level`) it is too weak to do harm, and not lowered.
    - Below `felt` it is too weak to do good: where more is called for by `|tau| > leap_gate`, it goes up to where
      it would be felt (a slope in log space grows with the value), by `most` rates at the most.

    After a rewind (`hdet.Rewind`) it goes on with the value that worked, if that was lower.

    What evidence does not tell (a level, a span, the training loss) is without effect.

    >>> regularize = Regularize(0.5)
    >>> move, _ = regularize.step(regularize.start(), Estimate(slope=0.2, stderr=0.1, level=1.0), Context(loss=0.9))
    >>> move
    -0.25
    >>> regularize.step(regularize.start(), Estimate(slope=0.2, stderr=0.1, level=1.0), Context(loss=0.7))[0]
    0.0
    """

    raise_after: float = Field(default=0.0, ge=0, le=1)
    gap: float = Field(default=0.2, ge=0)
    beyond: float = Field(default=2.0, gt=0, le=100)
    worthwhile: float = Field(default=1e-3, ge=0)
    felt: float = Field(default=1e-2, ge=0)
    leap_gate: float = Field(default=1.0, ge=0, le=100)

    def step(self, state: GatedState, estimate: Estimate, context: Context) -> tuple[float, GatedState]:
        if not self.hears(estimate, context):
            return 0.0, state
        state, tau = self.gather(state, estimate, context)
        move = self.move(tau, context)
        if move > 0:
            move = self._raised(move, tau, estimate, context)
        elif move < 0 and not self._harmful(estimate, context):
            move = 0.0
        return settled(move, self.settle, context), state

    def gather(self, state: GatedState, estimate: Estimate, context: Context) -> tuple[GatedState, float]:
        """Slopes per unit of the knob's value are summed, and their variances, not t-statistics."""
        if context.base <= 0.0:
            return state, 0.0
        kept = self.memory ** self._share(context)
        state = GatedState(
            kept * state.total + estimate.slope / context.base,
            kept**2 * state.variance + (estimate.stderr / context.base) ** 2,
        )
        return state, believable(state.total, math.sqrt(state.variance))

    def retreat(self, state: GatedState, context: Context, worked: float) -> tuple[float, GatedState]:
        if worked <= 0.0 or context.schedule_next <= 0.0:
            return 0.0, self.start()
        return min(0.0, math.log(worked / context.schedule_next) - context.shift), self.start()

    def _raised(self, move: float, tau: float, estimate: Estimate, context: Context) -> float:
        """How far up a knob goes that more is called for."""
        if context.total_steps is not None and context.step < self.raise_after * context.total_steps:
            return 0.0
        share = _relative(estimate) / self.felt if self.felt > 0 else 1.0
        if tau < -self.leap_gate and share < 1:
            furthest = self.rate * self.most
            move = max(move, min(-math.log(share), furthest) if share > 0 else furthest)
        return move if estimate.span is None else min(move, self.beyond * estimate.span)

    def _harmful(self, estimate: Estimate, context: Context) -> bool:
        """Whether a knob that less is called for does harm worth mending."""
        if _relative(estimate) < self.worthwhile:
            return False
        if context.loss is None or not estimate.level:
            return True
        return estimate.level - context.loss <= self.gap * abs(estimate.level)


def _relative(estimate: Estimate) -> float:
    """|slope| as a share of the level; infinite without one."""
    return abs(estimate.slope / estimate.level) if estimate.level else math.inf
