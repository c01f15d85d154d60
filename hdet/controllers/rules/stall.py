"""The last weights are believed where they call for less, if training makes no progress."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from pydantic import Field

from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import SlopeRule
from hdet.spec import register


@dataclass(frozen=True)
class StallState:
    """The progress of training.

    Attributes:
        lowest: the lowest mean training loss of a window.
        since: the step at which that window ended, or at which the rate was last lowered for a stall.
        waited: windows since then.
        lowered: in how many of them the rate was lowered.
    """

    lowest: float = math.inf
    since: int = 0
    waited: int = 0
    lowered: int = 0


@register
class Stall(SlopeRule):
    """Lower by `limit` where training is stalled and the last weights call for less.

    Training is stalled after `stall_windows` windows without a new lowest training loss, if the run is also
    `stall_ratio` times as long as it was at the lowest. The last weights of a run that makes progress call for less all
    the time, and that means nothing. Averaged weights that call for more (`t < -significance`) forbid it.

    After `stall_moves` windows in which the rate was lowered the wait begins anew.

    Args:
        significance: |t| from which either weights are believed.
        limit: size of the move, in coordinates.
        stall_ratio: length of the run over its length at the lowest training loss.
        stall_windows: windows without a new lowest training loss.
        stall_moves: windows in a row that may lower the rate.
    """

    needs_averaged: ClassVar[bool] = True

    significance: float = Field(default=2.0, gt=0, le=100)
    limit: float = Field(default=0.5, gt=0, le=10)
    stall_ratio: float = Field(default=1.5, gt=1, le=100)
    stall_windows: int = Field(default=3, ge=1, le=1000)
    stall_moves: int = Field(default=3, ge=1, le=1000)

    def start(self) -> StallState:
        return StallState()

    def observe(self, state: StallState, estimate: Estimate, context: Context) -> StallState:
        if context.loss is None:
            return state
        if context.loss < state.lowest:
            return StallState(lowest=context.loss, since=context.step)
        return replace(state, waited=state.waited + 1)

    def propose(self, state: StallState, estimate: Estimate, context: Context) -> float | None:
        averaged = estimate.averaged
        if averaged is None or estimate.t_of_eight <= self.significance or averaged.t_of_eight < -self.significance:
            return None
        return -self.limit if self._is_stalled(state, context) else None

    def moved(self, state: StallState, wish: float, move: float, estimate: Estimate, context: Context) -> StallState:
        if estimate.offset > 0 or wish >= 0 or not self._is_stalled(state, context):
            return state
        if state.lowered + 1 < self.stall_moves:
            return replace(state, lowered=state.lowered + 1)
        return StallState(lowest=state.lowest, since=context.step)

    def retreat(self, state: StallState, context: Context) -> StallState:
        return StallState(lowest=state.lowest, since=context.step)

    def restart(self, state: StallState, context: Context) -> StallState:
        return StallState(since=context.step)

    def _is_stalled(self, state: StallState, context: Context) -> bool:
        told = context.loss is not None and state.waited >= self.stall_windows
        return told and context.step >= self.stall_ratio * state.since
