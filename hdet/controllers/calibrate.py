"""The bracket rule: raise on what the last iterate proves, lower on what the averaged weights prove."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from pydantic import Field

from hdet.controllers.controller import Context, Controller, settled
from hdet.controllers.estimate import Estimate
from hdet.controllers.newton import newton_move
from hdet.errors import ConfigError
from hdet.spec import register


@dataclass(frozen=True)
class CalibrateState:
    """What is remembered of a run.

    Attributes:
        cap: the largest shift allowed; inf until capped.
        warnings: the run of warm-up windows that called for less.
        lowest: the lowest mean training loss of a window.
        since: the step at which that window ended, or a later one at which something was done about it.
        waited: windows since then, and `slowed`: in how many of them the value was lowered for it.
        lowered: whether the value was brought down after the look ahead.
    """

    cap: float = math.inf
    warnings: int = 0
    lowest: float = math.inf
    since: int = 0
    waited: int = 0
    slowed: int = 0
    lowered: bool = False


# Windows without a lower training loss that there must be before training is said to stand still, and how often in a
# row that lowers the value before it has to wait as long again.
_WINDOWS = 3
_ROW = 3


@register
class Calibrate(Controller):
    """Find the scale of a learning rate while the run goes on; for a knob in `Log` space.

    Judged by the last iterate a smaller step always looks better than it is, since it quiets gradient noise
    now and costs progress later; judged by window-averaged weights it looks worse. So "raise" is believed from
    the former and "lower" from the latter (mu is the shift, s the schedule's share of its peak, t and n the
    t-statistic and the Newton move of either judgement):

    - Look ahead: an estimate taken ahead of the base (`Estimate.offset`, early in the warm-up) judges the peak
      before it is reached: mu += n_last, up to `early_limit` either way, if `|t_last| > significance`; but not
      above `ceiling`.
    - Raise: `t_last < -significance`, `t_avg <= lower_significance`, and `s >= trusted_from` or the warm-up is
      over: mu += max(0, n_last). Earlier, small steps look too small only because the schedule is low.
    - Lower: before that, if `t_avg > lower_significance`: mu += min(0, n_avg).
    - Stall: if training stands still (the window with the lowest training loss ended at step s, and the run is at
      `stall` s or later and 3 windows further), `t_last > significance` and `t_avg >= -significance`: mu -= limit, up
      to 3 windows in a row; then the wait begins anew. In a run that makes progress the last weights call for less all
      the time, and it means nothing.
    - Return: below the schedule as given (mu < 0), where the last weights do not call for less and nothing but the look
      ahead has brought it down: mu += `back`, up to 0. Early in a run the loss is sharper than it will be, and looking
      ahead lowers too far; what the user set is the better guess until something speaks against it.
    - Cap: the first time that `t_last > significance` in `patience` consecutive warm-up windows, the peak may
      from then on be `headroom` times the present value at most: mu <= mu + log(headroom s). If mu is above
      that, it is brought down at once.
    - Hold otherwise. Averaged weights that were not read (`Estimate.nothing()`) lower nothing.
    - Retreat, after a rewind to a point where the value was b: mu is capped where the coming value would be b, and
      brought down to `slower` times below it, unless it is there already.
    - Restart, where the run begins anew from its first weights: `slower` times below the present value, from where
      it may be raised again. There is no new cap.

    Args:
        significance: the |t| that is believed of the last iterate.
        lower_significance: the t that is believed of averaged weights. A run that is lowered by mistake loses
            more than one that is not lowered soon, since a schedule that decays lowers it anyway.
        limit: largest Newton move, in coordinates.
        early_limit: the same while looking ahead.
        ceiling: largest shift that looking ahead may raise to. The default, a factor of e^5, limits next to nothing:
            on the plateau many runs start from, larger steps look better than they are, but a guard (`hdet.Rewind`)
            undoes what goes wrong. Without one, 0 is the cautious choice: not above the schedule as given.
        trusted_from: share of the schedule's peak from which "raise" is believed during the warm-up.
        patience: consecutive warm-up windows that must call for less before the cap falls.
        headroom: how far above the value that called for less the peak may lie, as a factor.
        until: share of the run after which the base holds and nothing is gathered: what is left of a schedule that
            decays cannot pay back a probe.
        slower: factor below what had worked at which the value goes on after a rewind; what is proved later may
            raise it again, up to what had worked.
        stall: how many times longer the run must be than it was at its lowest training loss, to stand still.
        back: largest step of a return in a window, in coordinates; 0 for none.
        settle: share of the run, at its end, over which raising and lowering fade to zero (the cap does not).

    Raises:
        ConfigError: the evidence has no judgement at averaged weights, not even one that says nothing.

    >>> calibrate = Calibrate()
    >>> raising = Estimate(slope=-0.3, curvature=1.0, stderr=0.1, averaged=Estimate(slope=0.1, stderr=0.1))
    >>> calibrate.step(calibrate.start(), raising, Context())[0]
    0.3
    """

    needs_averaged: ClassVar[bool] = True

    significance: float = Field(default=2.0, gt=0, le=100)
    lower_significance: float = Field(default=3.0, gt=0, le=100)
    limit: float = Field(default=0.5, gt=0, le=10)
    early_limit: float = Field(default=0.6, gt=0, le=10)
    ceiling: float = 5.0
    trusted_from: float = Field(default=0.25, ge=0, le=1)
    patience: int = Field(default=2, ge=1, le=1000)
    headroom: float = Field(default=3.0, gt=0, le=1000)
    until: float = Field(default=0.85, gt=0, le=1)
    slower: float = Field(default=3.0, ge=1, le=100)
    stall: float = Field(default=1.5, gt=1, le=100)
    back: float = Field(default=0.25, ge=0, le=10)
    settle: float = Field(default=0.0, ge=0, le=1)

    def listens(self, step: int, total_steps: int | None) -> bool:
        return total_steps is None or step < self.until * total_steps

    def wants_curvature(self, slope: Estimate, *, averaged: bool = False) -> bool:
        """It sizes a move: raising at the last weights, lowering at averaged ones, either when looking ahead."""
        if averaged:
            return slope.t > self.lower_significance
        return slope.t < -self.significance or (slope.offset > 0 and slope.t > self.significance)

    def start(self) -> CalibrateState:
        return CalibrateState()

    def step(self, state: CalibrateState, estimate: Estimate, context: Context) -> tuple[float, CalibrateState]:
        if not estimate.testable or not self.listens(context.step, context.total_steps):
            return 0.0, state
        state, stalled = self._progress(state, context)
        if estimate.offset > 0:
            return min(self._ahead(estimate, context), state.cap - context.shift), state
        averaged = estimate.averaged
        if averaged is None:
            raise ConfigError(
                "Calibrate was given an estimate without its counterpart at window-averaged weights; "
                "use evidence that has one (Line), or another controller, such as Gated or Newton"
            )
        state = self._watch(state, estimate, context)
        wish = self._wish(state, estimate, averaged, stalled, context)
        if stalled and wish < 0:
            state = self._slowed(state, context)
        move = min(settled(wish, self.settle, context), state.cap - context.shift)
        return move, replace(state, lowered=state.lowered or move < 0)

    def retreat(self, state: CalibrateState, context: Context, worked: float) -> tuple[float, CalibrateState]:
        """Go on `slower` times below the value that worked, and never again above it."""
        state = replace(state, warnings=0, since=context.step, waited=0, slowed=0, lowered=True)
        if worked <= 0.0 or context.schedule_next <= 0.0:
            return 0.0, state
        worked_shift = math.log(worked) - math.log(context.schedule_next)  # their ratio may overflow
        cap = min(state.cap, worked_shift)
        move = min(0.0, cap - math.log(self.slower) - context.shift)
        return move, replace(state, cap=cap)

    def restart(self, state: CalibrateState, context: Context) -> tuple[float, CalibrateState]:
        """Come to the present value from `slower` times below: fresh weights want a warm-up."""
        state = replace(state, warnings=0, lowest=math.inf, since=context.step, waited=0, slowed=0)
        return -math.log(self.slower), state

    def _ahead(self, last: Estimate, context: Context) -> float:
        """The move that an estimate taken ahead of the base calls for."""
        if abs(last.t) <= self.significance:
            return 0.0
        move = newton_move(last, self.early_limit)
        return min(move, max(0.0, self.ceiling - context.shift))

    def _wish(
        self, state: CalibrateState, last: Estimate, averaged: Estimate, stalled: bool, context: Context
    ) -> float:
        """Raise, lower or hold, before the cap."""
        if averaged.testable and averaged.t > self.lower_significance:
            return min(0.0, newton_move(averaged, self.limit))
        if last.t > self.significance:
            return -self.limit if stalled and averaged.t >= -self.significance else 0.0
        if context.warming and context.fraction < self.trusted_from:
            return 0.0
        if last.t < -self.significance:
            return max(0.0, newton_move(last, self.limit))
        return 0.0 if state.lowered else min(self.back, max(0.0, -context.shift))

    def _progress(self, state: CalibrateState, context: Context) -> tuple[CalibrateState, bool]:
        """Keep the lowest training loss; whether there has been none lower for long."""
        if context.loss is None:
            return state, False
        if context.loss < state.lowest:
            return replace(state, lowest=context.loss, since=context.step, waited=0, slowed=0), False
        state = replace(state, waited=state.waited + 1)
        return state, state.waited >= _WINDOWS and context.step >= self.stall * state.since

    def _slowed(self, state: CalibrateState, context: Context) -> CalibrateState:
        """Lowered because training stands still; `_ROW` times in a row it may be, and then has to wait."""
        if state.slowed + 1 < _ROW:
            return replace(state, slowed=state.slowed + 1)
        return replace(state, since=context.step, waited=0, slowed=0)

    def _watch(self, state: CalibrateState, last: Estimate, context: Context) -> CalibrateState:
        """Count warnings; set the cap once."""
        if math.isfinite(state.cap) or not context.warming:
            return replace(state, warnings=0)
        warnings = state.warnings + 1 if last.t > self.significance else 0
        if warnings < self.patience or context.fraction <= 0:
            return replace(state, warnings=warnings)
        return replace(state, cap=context.shift + math.log(self.headroom * context.fraction), warnings=0)
