"""Many learning rates, each with what all have in common and what evidence says of itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from hdet.controllers.calibrate import Calibrate
from hdet.controllers.controller import Context, Controller, Judgement
from hdet.controllers.estimate import Estimate
from hdet.controllers.sub_batches import accumulated, student
from hdet.spec import register


@dataclass(frozen=True)
class PooledState:
    """What is remembered of one group.

    Attributes:
        common: the state of the common rule, by the name `rule`.
        relative: the part of the shift that is the group's alone, in coordinates.
        slopes: discounted sums of relative slopes by sub-batch, as they would be at the present shift.
        curvature: the discounted sum of curvatures.
        last_move: what the last window moved the relative part by.
        expected_shift: the whole shift after that window, if bounds cut off nothing.
    """

    common: Mapping[str, Any]
    relative: float = 0.0
    slopes: tuple[float, ...] = ()
    curvature: float = 0.0
    last_move: float = 0.0
    expected_shift: float = 0.0


@register
class Pooled(Controller):
    """shift_k = common + relative_k, for learning rates of groups that `GroupLines` judges.

    The common part moves by a rule for one learning rate. All groups hear the same of it, so they move alike. The
    relative part is a Newton step on what has added up over the windows, shrunk towards none by its own evidence (the
    positive-part estimator of James and Stein, one group at a time):

        Z_j <- memory Z_j + slope_j,   C <- memory C + curvature,   t = mean(Z) / (sd(Z) / sqrt(J))
        move = -(mean(Z) / C) max(0, 1 - (significance / t)^2), at most `limit`

    t is a Student t on J - 1 degrees of freedom, taken as the normal deviate that is as unlikely. What a move has
    answered counts as answered: Z_j <- Z_j + move C. What bounds or authority cut off a move is taken back from both.

    After a new start the common part goes where its rule says, and the relative part stays. After a rewind each group
    goes on from its own value at the best point, so a ratio that was learned since is lost. What had added up is
    forgotten.

    Args:
        common: the rule of the common part.
        significance: the |t| that is believed of what a single group says.
        memory: share of the sums kept from window to window.
        limit: largest move of the relative part, in coordinates.
        reach: how far the relative part may go either way, in coordinates.

    >>> pooled = Pooled()
    >>> slower = Estimate(slope=0.1, stderr=0.01, curvature=0.5, slopes=(0.09, 0.1, 0.11, 0.1))
    >>> held = Estimate(slope=0.0, stderr=1.0, averaged=Estimate.nothing(), relative=slower)
    >>> round(pooled.step(pooled.start(), held, Context())[0], 3)
    -0.141
    """

    common: Controller = Calibrate()
    significance: float = Field(default=2.0, ge=0, le=100)
    memory: float = Field(default=0.8, ge=0, lt=1)
    limit: float = Field(default=0.35, gt=0, le=10)
    reach: float = Field(default=4.0, ge=0, le=100)

    @property
    def needs_averaged(self) -> bool:
        """Whether the common rule reads `Estimate.averaged`."""
        return self.common.needs_averaged

    def listens(self, step: int, total_steps: int | None) -> bool:
        return self.common.listens(step, total_steps)

    def wants_curvature(self, slope: Estimate, *, averaged: bool = False) -> bool:
        return self.common.wants_curvature(slope, averaged=averaged)

    def start(self) -> PooledState:
        return PooledState({"rule": self.common.start()})

    def step(self, state: PooledState, estimate: Estimate, context: Context) -> tuple[float, PooledState]:
        judged = self.judge(state, estimate, context)
        return judged.move, judged.state

    def judge(self, state: PooledState, estimate: Estimate, context: Context) -> Judgement:
        """Both parts' moves, and who decided on the common one."""
        state = _placed(state, context)
        common = self.common.judge(state.common["rule"], estimate, _apart(context, state))
        state = replace(state, common={"rule": common.state})
        own = estimate.relative
        if own is None or not own.has_sub_batches or not own.curvature or own.curvature <= 0.0:
            return replace(common, state=state)
        if not self.listens(context.step, context.total_steps):
            return replace(common, state=state)
        slopes = accumulated(state.slopes, own.slopes, self.memory)
        kept = self.memory * state.curvature if len(state.slopes) == len(own.slopes) else 0.0
        state = replace(state, slopes=slopes, curvature=kept + own.curvature)
        move = self._move(state)
        answered = tuple(slope + move * state.curvature for slope in slopes)
        both = common.move + move
        moved = replace(state, relative=state.relative + move, slopes=answered, last_move=move)
        return replace(common, move=both, state=replace(moved, expected_shift=context.shift + both))

    def retreat(self, state: PooledState, context: Context, worked: float) -> tuple[float, PooledState]:
        """The common part goes on as its rule says; `worked` held the relative part too."""
        state = _placed(state, context)
        alone = worked * math.exp(-state.relative)
        move, rule = self.common.retreat(state.common["rule"], _apart(context, state), alone)
        return move, PooledState({"rule": rule}, state.relative)

    def restart(self, state: PooledState, context: Context) -> tuple[float, PooledState]:
        """The common part goes on as its rule says."""
        state = _placed(state, context)
        move, rule = self.common.restart(state.common["rule"], _apart(context, state))
        return move, PooledState({"rule": rule}, state.relative)

    def _move(self, state: PooledState) -> float:
        """What the sums call for, as far as they prove it."""
        t = student(state.slopes)
        if abs(t) <= self.significance:
            return 0.0
        newton = -math.fsum(state.slopes) / len(state.slopes) / state.curvature
        move = newton * (1.0 - (self.significance / t) ** 2)
        move = max(-self.limit, min(self.limit, move))
        return max(-self.reach, min(self.reach, state.relative + move)) - state.relative


def _placed(state: PooledState, context: Context) -> PooledState:
    """The state where the shift is now: of the last move, which bounds may have cut off, the group's own part first."""
    missing = state.expected_shift - context.shift
    own = min(max(missing, min(state.last_move, 0.0)), max(state.last_move, 0.0))
    slopes = tuple(slope - own * state.curvature for slope in state.slopes)
    return replace(state, relative=state.relative - own, slopes=slopes, last_move=0.0)


def _apart(context: Context, state: PooledState) -> Context:
    """The same place in the run, for who knows of the common part alone."""
    return replace(context, shift=context.shift - state.relative)
