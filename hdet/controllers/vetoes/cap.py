"""A peak that a warm-up has shown to be too high is not reached."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pydantic import Field

from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import Veto
from hdet.spec import register


@dataclass(frozen=True)
class CapState:
    """The largest shift allowed, infinite until it is known, and warm-up windows in a row that called for less."""

    cap: float = math.inf
    warnings: int = 0


@register
class Cap(Veto):
    """Bound the shift once the last weights have called for less in `patience` windows of the warm-up in a row.

    The peak may then be `headroom` times the present value at most: with the schedule at the share s of its peak,
    `shift <= shift + log(headroom s)`. A base above that is brought down at once. The cap is set once.

    After a rewind the shift is bounded by the one that had worked, if that is lower. A new start sets no cap.

    Args:
        significance: t at the last weights from which they are believed.
        patience: warm-up windows in a row that must call for less.
        headroom: the peak over the value that called for less.
    """

    significance: float = Field(default=2.0, gt=0, le=100)
    patience: int = Field(default=2, ge=1, le=1000)
    headroom: float = Field(default=3.0, gt=0, le=1000)

    def start(self) -> CapState:
        return CapState()

    def observe(self, state: CapState, estimate: Estimate, context: Context) -> CapState:
        if estimate.offset > 0:
            return state
        if math.isfinite(state.cap) or not context.warming:
            return replace(state, warnings=0)
        warnings = state.warnings + 1 if estimate.t > self.significance else 0
        if warnings < self.patience or context.fraction <= 0:
            return replace(state, warnings=warnings)
        return CapState(cap=context.shift + math.log(self.headroom * context.fraction))

    def highest(self, state: CapState) -> float:
        return state.cap

    def retreat(self, state: CapState, context: Context, worked_shift: float | None) -> CapState:
        return CapState(cap=state.cap if worked_shift is None else min(state.cap, worked_shift))

    def restart(self, state: CapState, context: Context) -> CapState:
        return CapState(cap=state.cap)
