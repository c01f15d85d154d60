"""Slopes of many windows add up, where each of them proves little."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.gap import gap_of
from hdet.controllers.gated import Sums, gated_move, window_share
from hdet.controllers.part import SlopeRule
from hdet.spec import register
from hdet.sub_batches import accumulated

# Windows in a row against the sum, after which it is begun anew: one slope that was enormous must not rule for ever.
_WINDOWS_AGAINST = 4
# By so much a loss may fall before older slopes count for less: those of an enormous loss are enormous too.
_MOST_FALL = 2.0


@dataclass(frozen=True)
class SlopeSumState(Sums):
    """The discounted sum of slopes per unit of the knob's value.

    Attributes:
        against: windows in a row whose slope had another sign than the sum.
        first, lowest: held-out loss of the first window that told it, and the lowest since; infinite before.
    """

    against: int = 0
    first: float = math.inf
    lowest: float = math.inf

    @property
    def fall(self) -> float:
        """How far the held-out loss has fallen; 0 where nobody told it."""
        return self.first - self.lowest if self.first < math.inf else 0.0

    @property
    def scale(self) -> float:
        """The held-out loss that sums are measured by: the first, or twice the lowest where that is less."""
        return min(self.first, _MOST_FALL * self.lowest)

    def with_level(self, level: float | None) -> SlopeSumState:
        """The state with a window's held-out loss."""
        if level is None or not math.isfinite(level):
            return self
        return replace(self, first=self.first if self.first < math.inf else level, lowest=min(self.lowest, level))


@register
class SlopeSum(SlopeRule):
    """Move against the sum of slopes once it passes a gate, as `Gated` does.

    A slope in log space grows with the value, at the most in proportion to it.

        S <- memory S + slope / value,   tau = S / stderr(S)
        move = -rate clip(tau / saturation, -1, 1)  if |tau| > gate

    `Gated` sums t-statistics. A sum of slopes does not believe most the windows whose probe batches are easy: their
    errors are small. Early windows are believed less, unless decay takes a large share of how far the held-out loss has
    fallen. Later the first move down that is well proven is larger, if some share of it is at stake and nothing is
    overfitted (docs/evidence.md).

    Once the lowest held-out loss is less than half of the first, the sum shrinks in proportion to it; a loss that is
    not above 0 changes nothing. The sum is begun anew by four windows in a row that say the opposite, and where windows
    come to have other sub-batches than those before, or none.

    Args:
        rate: largest move in a window of `window_steps` steps, in coordinates. Other windows have their share of it,
            by their length.
        gate: |tau| that a move up takes.
        lower_gate: tau that a move down takes: a slope tells of the next steps, in which less decay is better more
            often than in the run.
        early_gate: the same before the share `early_until` of the run, if it is higher. A run without a known end has
            no share.
        costly: share of the loss's fall so far that what is left of the sum is worth at the present base, from which
            `early_gate` does not count, and a move down before `early_until` is larger by how many times it is passed.
        late_costly: the same from `early_until` on, where tau is above `early_gate`, the window's held-out loss is no
            higher than its training loss, and the base is no more than `late_below` below the schedule as given.
            Without a known end there is none.
        late_below: in coordinates.
        max_boost: how many times larger that makes it.
        saturation: tau at which a move down is as large as it gets.
        raise_saturation: |tau| at which a move up is: slopes are small where decay is too weak.
        max_scale: how many `rate` one window may move by, however long it is and whatever decay costs.
        memory: share of the sum that is kept over `window_steps` steps.
        window_steps: steps of a window that `rate` and `memory` are meant for.

    >>> rule = SlopeSum(rate=0.5)
    >>> state = rule.observe(rule.start(), Estimate(slope=0.4, stderr=0.1), Context(length=30))
    >>> rule.propose(state, Estimate(slope=0.4, stderr=0.1), Context(length=30))
    -0.5
    """

    rate: float = Field(default=0.4, gt=0, le=10)
    gate: float = Field(default=1.0, ge=0, le=100)
    lower_gate: float = Field(default=2.0, ge=0, le=100)
    early_gate: float = Field(default=3.0, ge=0, le=100)
    early_until: float = Field(default=0.3, ge=0, le=1)
    costly: float = Field(default=0.25, gt=0)
    late_costly: float = Field(default=0.03, gt=0)
    late_below: float = Field(default=0.25, ge=0, le=10)
    max_boost: float = Field(default=4.0, ge=1, le=100)
    saturation: float = Field(default=4.0, gt=0, le=100)
    raise_saturation: float = Field(default=2.0, gt=0, le=100)
    max_scale: float = Field(default=4.0, gt=0, le=100)
    memory: float = Field(default=0.8, ge=0, lt=1)
    window_steps: int | None = Field(default=30, ge=1)

    def start(self) -> SlopeSumState:
        return SlopeSumState()

    def observe(self, state: Any, estimate: Estimate, context: Context) -> Any:
        if context.base <= 0.0:
            return state
        slope, error = estimate.slope / context.base, estimate.normal_stderr / context.base
        against = state.against + 1 if slope * state.total < 0 else 0
        if against >= _WINDOWS_AGAINST or (state.sums and not estimate.has_sub_batches):
            against, kept = 0, 0.0
        else:
            kept = self.memory ** window_share(self.window_steps, context)
        after = state.with_level(estimate.level)
        if 0.0 < after.scale < state.scale < math.inf:
            kept *= after.scale / state.scale
        total, variance = kept * state.total + slope, kept * kept * state.variance + error * error
        sums: tuple[float, ...] = ()
        if estimate.has_sub_batches:
            sums = accumulated(state.sums, [own / context.base for own in estimate.slopes], kept)
            total, variance = sum(own / len(sums) for own in sums), 0.0
        if not (math.isfinite(total) and math.isfinite(variance)):
            return self.retreat(state, context)
        return replace(after, total=total, variance=variance, sums=sums, against=against)

    def propose(self, state: SlopeSumState, estimate: Estimate, context: Context) -> float | None:
        if context.base <= 0.0:
            return None
        scale = min(window_share(self.window_steps, context), self.max_scale)
        if state.tau <= 0.0:
            return gated_move(state.tau, self.rate, self.gate, self.raise_saturation, scale) or None
        gate, boost = self.lower_gate, 1.0
        if context.before(self.early_until):
            boost = self._boost(state, context, self.costly)
            gate = gate if boost > 1.0 else max(gate, self.early_gate)
        elif self._is_proven_late(state, estimate, context):
            boost = self._boost(state, context, self.late_costly)
        scale = min(boost * scale, self.max_scale)
        return gated_move(state.tau, self.rate, gate, self.saturation, scale) or None

    def _boost(self, state: SlopeSumState, context: Context, costly: float) -> float:
        """How many times larger a move down is for what the knob costs."""
        cost = state.total * context.base / state.fall if state.fall > 0.0 else 0.0
        return min(max(cost / costly, 1.0), self.max_boost)

    def _is_proven_late(self, state: SlopeSumState, estimate: Estimate, context: Context) -> bool:
        """Whether a first move down is well proven, in a run whose end is known and whose window is not overfitted."""
        if context.total_steps is None or state.tau <= self.early_gate or context.shift < -self.late_below:
            return False
        gap = gap_of(estimate, context)
        return gap is not None and gap <= 0.0
