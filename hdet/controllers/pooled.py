"""Many learning rates, each with what all have in common and its place among the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field, model_validator

from hdet.controllers.calibrate import Calibrate
from hdet.controllers.controller import ROUNDING, Context, Controller, Judgement, left_alone
from hdet.controllers.estimate import Estimate
from hdet.record import BALANCE
from hdet.spec import register


@dataclass(frozen=True)
class PooledState:
    """What is remembered of one group.

    Attributes:
        common: the state of the common rule, by the name `rule`.
        untrained: whether the run's first window told that nothing had trained the model.
        measured: whether the group was ever compared by how far its steps go.
        steps: at which the part of the shift that is the group's alone was moved.
        places: that part after each of these moves, in coordinates.
        last_move: what the last window moved it by.
        expected_shift: the whole shift after that window, if bounds cut off nothing.
    """

    common: Mapping[str, Any]
    untrained: bool = False
    measured: bool = False
    steps: tuple[float, ...] = ()
    places: tuple[float, ...] = ()
    last_move: float = 0.0
    expected_shift: float = 0.0

    @property
    def relative(self) -> float:
        """The part of the shift that is the group's alone, in coordinates."""
        return self.places[-1] if self.places else 0.0

    def relative_at(self, point: int | None) -> float:
        """The same at a point of the run: that of the moves made before it."""
        before = [place for step, place in zip(self.steps, self.places, strict=True) if point is None or step < point]
        return before[-1] if before else 0.0


@register
class Pooled(Controller):
    """shift_k = common + relative_k, for learning rates of groups that `GroupLines` judges.

    The common part moves by a rule for one learning rate. All groups hear the same of it, so they move alike
    where their schedules have one form.

    The relative part is moved where the evidence compares groups, in an untrained model: each goes to where its steps,
    beside its weights, go as far as those of all in the mean. Layers that learn together want steps of a like size
    (Yang, Simon and Bernstein 2023, arXiv:2310.17813), and one that this was never told of to the rate that the others
    go to. Of a model that was trained before ratios stay as given.

    After a new start or a rewind the common part goes where its rule says, and the relative part stays. What bounds or
    authority cut off a move is taken back from both.

    Args:
        common: the rule of the common part.
        band: how far a group's steps may lie from the mean of all groups', as a logarithm.
        limit: largest move of the relative part at once, in coordinates.
        grid: of whose multiples the relative part is one, and at most `limit`. So many groups have few different
            rates, and an optimizer steps groups of one rate in one call of its kernel. 0 lets it be anything.

    >>> pooled = Pooled()
    >>> faster = Estimate(slope=0.0, stderr=1.0, averaged=Estimate.nothing(), excess=1.0, step_ratio=3.0)
    >>> round(pooled.step(pooled.start(), faster, Context())[0], 3)
    -1.099
    """

    common: Controller = Calibrate()
    band: float = Field(default=0.0, ge=0, le=10)
    limit: float = Field(default=2.5, gt=0, le=10)
    grid: float = Field(default=0.0, ge=0, le=10)

    @model_validator(mode="after")
    def _grid_is_within_reach(self) -> Pooled:
        if self.grid > self.limit:
            raise ValueError(f"grid={self.grid:g} is more than limit={self.limit:g}, so no group could be moved")
        return self

    @property
    def needs_averaged(self) -> bool:
        """Whether the common rule reads `Estimate.averaged`."""
        return self.common.needs_averaged

    @property
    def shares(self) -> bool:
        return True

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
        """Both parts' moves, and who decided on the larger one."""
        state = _placed(state, context)
        common = self.common.judge(state.common["rule"], estimate, _apart(context, state))
        untrained = state.untrained or bool(estimate.untrained)
        measured = state.measured or estimate.step_ratio is not None
        state = replace(state, untrained=untrained, measured=measured)
        own = self._own(state, estimate) if self.listens(context.step, context.total_steps) else 0.0
        if own:
            places = (*state.places, state.relative + own)
            state = replace(state, steps=(*state.steps, context.step), places=places)
        both = common.move + own
        after = replace(state, common={"rule": common.state}, last_move=own, expected_shift=context.shift + both)
        judged = replace(common, move=both, state=after, alone=own)
        return replace(judged, rule=BALANCE, veto="") if abs(own) > abs(common.move) else judged

    def retreat(self, state: PooledState, context: Context, worked: float) -> tuple[float, PooledState]:
        """The common part goes on as its rule says; `worked` held the relative part as it was then, too."""
        state = _placed(state, context)
        common_alone = worked * math.exp(-state.relative_at(context.point))
        move, rule = self.common.retreat(state.common["rule"], _apart(context, state), common_alone)
        return move, replace(state, common={"rule": rule})

    def restart(self, state: PooledState, context: Context) -> tuple[float, PooledState]:
        """The common part goes on as its rule says."""
        state = _placed(state, context)
        move, rule = self.common.restart(state.common["rule"], _apart(context, state))
        return move, replace(state, common={"rule": rule})

    def _own(self, state: PooledState, estimate: Estimate) -> float:
        """The move to the nearest place within the band."""
        ratio = estimate.step_ratio if state.measured else estimate.rate_ratio
        if not state.untrained or not ratio:
            return 0.0
        far = math.log(ratio)
        move = max(-self.limit, min(self.limit, max(-self.band, min(self.band, far)) - far))
        if self.grid and abs(move) > ROUNDING:
            place = round((state.relative + move) / self.grid) * self.grid
            if abs(place - state.relative) > self.limit + ROUNDING:
                place -= math.copysign(self.grid, move)
            move = place - state.relative if (place - state.relative) * move > 0.0 else 0.0
        return move if abs(move) > ROUNDING else 0.0


def _placed(state: PooledState, context: Context) -> PooledState:
    """The state where the shift is now: bounds may have cut off some of the last move."""
    if not state.last_move:
        return state
    left = left_alone(state.last_move, state.expected_shift - context.shift)
    place = state.relative - state.last_move + left
    return replace(state, places=(*state.places[:-1], place), last_move=0.0)


def _apart(context: Context, state: PooledState) -> Context:
    """The same place in the run, for who knows of the common part alone."""
    return replace(context, shift=context.shift - state.relative)
