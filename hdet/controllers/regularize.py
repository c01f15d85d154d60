"""How strongly the weights are held back: gated steps, and what is known of evidence that speaks too soon."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from hdet.controllers.controller import Context, settled
from hdet.controllers.estimate import Estimate
from hdet.controllers.gated import Gated, GatedState, believable, clipped
from hdet.controllers.sub_batches import accumulated, student
from hdet.spec import register

# Share that the mean gap between held-out and training loss keeps of windows before: a memory of about three.
_KEPT = 0.7
# Windows in a row that say the opposite of the sum of all before, after which it is begun anew.
_AGAINST = 4
# Gap of the first window, as a share of the held-out loss, from which the two losses are not on one scale: nothing can
# be overfitted as early. A training loss that was divided by two or more micro-batches is further below.
_FOREIGN = 0.25


@dataclass(frozen=True)
class RegularizeState(GatedState):
    """`GatedState`, and more.

    Attributes:
        gap: how far held-out loss is above training loss, as a share of it: the mean over `seen` windows.
        against: the run of windows whose slope was against the sum.
        compared: whether a window has told a gap.
        foreign: whether the first that did showed two losses that are not on one scale.
    """

    gap: float = 0.0
    seen: float = 0.0
    against: int = 0
    compared: bool = False
    foreign: bool = False


@register
class Regularize(Gated):
    """`Gated` for weight decay judged by `Analytic` evidence; for a knob in `Log` space.

    What decay did to the weights, and nothing of how gradients answer, is what that evidence sees: it speaks of the
    next steps where decay acts on the whole run. More is therefore asked than tau (see `Gated`):

    - Nothing is raised in the first `raise_after` of the run. Weights that have learnt nothing yet are best shrunk,
      which says nothing of the decay that suits them later.
    - Nothing is raised unless held-out loss is above training loss by the share `need` of itself: a model that fits
      both alike needs no more restraint. Where training loss is above by as much it is another thing (dropout, label
      smoothing, a penalty) and says nothing. (The gap is a mean of about three windows.)
    - Nothing is lowered while it is above by the share `gap`. Less decay always fits better now; what it is there for
      shows later, on a model that fits too well already.
    - Nothing is raised by more than `beyond` times what was measured (`Estimate.span`): where weights decay many
      times over within a window, only a small change of it was.
    - Nothing is moved against the slope of the window that has closed.
    - Nothing is moved unless the gap is known. A window without a training loss, or without a held-out one
      (`Estimate.level`), says nothing, and both losses have to be on one scale. They are not where held-out loss is
      above training loss by a quarter of itself in the first window, before anything can be overfitted. So it is with a
      training loss that was divided by the number of micro-batches: hand over the mean over the batch instead.

    tau is the discounted sum of slopes, per unit of the knob's value, over its standard error. A sum of t-statistics
    would believe most the windows with easy probe batches: they call for less decay, and their errors are small. Four
    windows in a row that say the opposite begin it anew: a loss that once was enormous does not rule for ever.

    The gate is 2, where `Gated` has 1: a knob without effect has |tau| > 1 in a third of all windows, and what such
    windows raise (see below) no later ones lower.

    A knob that hardly acts tells little, whichever way it points:

    - Below a |slope| of `worthwhile` times the level (`Estimate.level`) it is too weak to do harm, and not lowered.
    - Below `felt` it is too weak to do good: where more is called for, by `tau < -leap_gate`, it goes up to where it
      would be felt (a slope in log space grows with the value), by `most` rates at the most.

    After a rewind (`hdet.Rewind`) it goes on with the value that worked, if that was lower.

    A condition that was told nothing forbids the move: without a span nothing is raised.

    >>> regularize = Regularize(0.5)
    >>> too_much = Estimate(slope=0.2, stderr=0.05, level=1.0, span=1.0)
    >>> [regularize.step(regularize.start(), too_much, Context(loss=loss))[0] for loss in (0.9, 0.7, None)]
    [-0.5, 0.0, 0.0]
    """

    gate: float = Field(default=2.0, ge=0, le=100)
    raise_after: float = Field(default=0.0, ge=0, le=1)
    gap: float = Field(default=0.2, ge=0, le=1)
    need: float = Field(default=0.02, ge=0, le=1)
    beyond: float = Field(default=2.0, gt=0, le=100)
    worthwhile: float = Field(default=1e-3, ge=0)
    felt: float = Field(default=1e-2, ge=0)
    leap_gate: float = Field(default=1.0, ge=0, le=100)

    def start(self) -> RegularizeState:
        return RegularizeState()

    def step(self, state: Any, estimate: Estimate, context: Context) -> tuple[float, RegularizeState]:
        if not self.hears(estimate, context):
            return 0.0, state
        gap = _gap(estimate, context)
        if gap is not None:
            state = _compared(state, gap)
        state, tau = self.gather(state, estimate, context)
        move = self.move(tau, context)
        if gap is None or state.foreign or move * estimate.slope > 0:
            move = 0.0  # the gap is not known, or what adds up is of the past and this window says otherwise
        elif move > 0:
            move = self._raised(move, tau, state, estimate, context)
        elif move < 0 and not self._harmful(state, estimate):
            move = 0.0
        return settled(move, self.settle, context), state

    def gather(self, state: Any, estimate: Estimate, context: Context) -> tuple[RegularizeState, float]:
        """Slopes per unit of the knob's value are summed, and their variances, not t-statistics."""
        if context.base <= 0.0:
            return state, 0.0
        slope, error = estimate.slope / context.base, estimate.stderr / context.base
        against = state.against + 1 if slope * state.total < 0 else 0
        kept = self.memory ** self._share(context) if against < _AGAINST else 0.0
        total, variance = kept * state.total + slope, kept * kept * state.variance + error * error
        sums: tuple[float, ...] = ()
        if estimate.has_sub_batches:
            sums = accumulated(state.sums, [own / context.base for own in estimate.slopes], kept)
            total, variance = sum(own / len(sums) for own in sums), 0.0
        if not (math.isfinite(total) and math.isfinite(variance)):
            return replace(state, total=0.0, variance=0.0, sums=(), against=0), 0.0
        state = replace(state, total=total, variance=variance, sums=sums, against=against % _AGAINST)
        return state, clipped(student(sums)) if sums else believable(total, math.sqrt(variance))

    def retreat(self, state: Any, context: Context, worked: float) -> tuple[float, RegularizeState]:
        fresh = replace(self.start(), compared=state.compared, foreign=state.foreign)
        if worked <= 0.0 or context.schedule_next <= 0.0:
            return 0.0, fresh
        return min(0.0, math.log(worked) - math.log(context.schedule_next) - context.shift), fresh

    def _raised(self, move: float, tau: float, state: RegularizeState, estimate: Estimate, context: Context) -> float:
        """How far up a knob goes that more is called for."""
        if estimate.span is None or abs(state.gap) < self.need:
            return 0.0
        if context.total_steps is not None and context.step < self.raise_after * context.total_steps:
            return 0.0
        share = _relative(estimate) / self.felt if self.felt > 0 else 1.0
        if tau < -self.leap_gate and share < 1:
            furthest = self.rate * self.most
            move = max(move, min(-math.log(share), furthest) if share > 0 else furthest)
        return min(move, self.beyond * estimate.span)

    def _harmful(self, state: RegularizeState, estimate: Estimate) -> bool:
        """Whether a knob that less is called for does harm worth mending."""
        if _relative(estimate) < self.worthwhile:
            return False
        return state.gap <= self.gap


def _compared(state: RegularizeState, gap: float) -> RegularizeState:
    """A window's gap taken into the mean."""
    seen = _KEPT * state.seen + 1.0
    foreign = state.foreign if state.compared else gap > _FOREIGN
    return replace(state, gap=state.gap + (gap - state.gap) / seen, seen=seen, compared=True, foreign=foreign)


def _gap(estimate: Estimate, context: Context) -> float | None:
    """How far held-out loss is above training loss, as a share of it; None where one of them was not told."""
    level, loss = estimate.level, context.loss
    if not level or loss is None or not (math.isfinite(level) and math.isfinite(loss)):
        return None
    return max(-1.0, min(1.0, (level - loss) / abs(level)))


def _relative(estimate: Estimate) -> float:
    """|slope| as a share of the level; infinite without one."""
    return abs(estimate.slope / estimate.level) if estimate.level else math.inf
