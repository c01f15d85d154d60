"""What the user set is information: to leave it upwards takes the more proof the further it goes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pydantic import Field

from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import Veto
from hdet.controllers.small_steps import Beginning
from hdet.controllers.sub_batches import accumulated, scatter_t
from hdet.spec import register


@dataclass(frozen=True)
class AboveGivenState(Beginning):
    """What has been proved where the base stands, and how training has begun.

    Attributes:
        sums: by sub-batch the sum of the slopes since the base last moved.
    """

    sums: tuple[float, ...] = ()


@register
class AboveGiven(Veto):
    """Between the schedule as given and `max_distance`, raise only on `t < -significance (1 + s^2 shift / doubled_at)`.

    Early in training larger steps look better than they are, by an error that no standard error tells. t may be that of
    the window, or that of all windows since the base last moved: their slopes are summed by sub-batch. A short run has
    few windows to prove it in: s = min(1, total_steps / full_from) reduces what is asked for; without a known end it is
    1. The shift counts from the schedule: a knob's `initial_shift` is part of it.

    A window's slope in log space is about what its steps have gained. If the steps that are left would gain less than
    `min_gain` of the loss in this way, the run leads nowhere, and no more is asked for than the rule that raises asks
    for itself. The same holds from a shift of `max_distance` on: what was set says nothing of how much further to go;
    and, while an untrained model warms up, for raises to where steps are still too small (`Estimate.step_size`).

    Args:
        significance: |t| that is asked for at the schedule as given, and below it.
        doubled_at: shift at which twice as much is asked for in a long run; by default a factor of 3.
        full_from: steps of a run from which the proof is asked for in full; 0 asks for it in every run.
        max_distance: shift from which no more is asked for than by the rule that raises; by default a factor of 10.
        too_small: `step_size` up to which no more is asked for.
        min_gain: share of the loss that the rest of the run has to promise. 0 asks for the proof in any case, and so
            does a run without a known end.

    >>> veto, proof = AboveGiven(), Estimate(slope=-3.0, stderr=1.0, level=1.0)
    >>> runs = [Context(shift=math.log(3.0), total_steps=steps) for steps in (100, 10_000)]
    >>> [veto.allow(0.5, veto.start(), proof, run) for run in runs]
    [0.5, 0.0]
    """

    significance: float = Field(default=2.0, gt=0, le=100)
    doubled_at: float = Field(default=math.log(3.0), gt=0)
    full_from: int = Field(default=2000, ge=0)
    max_distance: float = Field(default=math.log(10.0), gt=0, le=100)
    too_small: float = Field(default=0.3, ge=0, le=100)
    min_gain: float = Field(default=0.25, ge=0, le=1)

    def start(self) -> AboveGivenState:
        return AboveGivenState()

    def observe(self, state: AboveGivenState, estimate: Estimate, context: Context) -> AboveGivenState:
        if estimate.untrained is not None:
            state = replace(state, untrained=estimate.untrained)
        if not estimate.has_sub_batches:
            return state
        return replace(state, sums=accumulated(state.sums, estimate.slopes, 1.0))

    def moved(
        self, state: AboveGivenState, wish: float, move: float, estimate: Estimate, context: Context
    ) -> AboveGivenState:
        return state if move == 0 else replace(state, sums=())

    def allow(self, move: float, state: AboveGivenState, estimate: Estimate, context: Context) -> float:
        if move <= 0 or not 0 < context.shift < self.max_distance:
            return move
        if self._stays_small(move, state, estimate) or self._leads_nowhere(estimate, context):
            return move
        steps = math.inf if context.total_steps is None else context.total_steps
        share = steps / self.full_from if steps < self.full_from else 1.0
        asked = self.significance * (1.0 + share**2 * context.shift / self.doubled_at)
        return move if min(estimate.t, scatter_t(state.sums)) < -asked else 0.0

    def _stays_small(self, move: float, state: AboveGivenState, estimate: Estimate) -> bool:
        size = estimate.step_size
        return state.untrained and size is not None and size * math.exp(move) <= self.too_small * (1.0 + 1e-9)

    def _leads_nowhere(self, estimate: Estimate, context: Context) -> bool:
        if context.total_steps is None or estimate.level is None:
            return False
        promised = -estimate.slope * (context.total_steps - context.step) / context.length
        return promised < self.min_gain * abs(estimate.level)
