"""What a controller is given and what it must do."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from hdet.controllers.estimate import Estimate
from hdet.errors import ConfigError
from hdet.spec import Spec

ROUNDING = 1e-12
"""Of a shift, in coordinate units: what less comes to is no move."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """Where the run stands at a window's end, for one knob.

    The defaults describe a constant knob of value 1 at the start of an endless run.

    Args:
        base: the knob's value now, shift included.
        schedule_now: the schedule's value now, without the shift.
        schedule_next: the schedule's value at the next window's first step.
        peak: the schedule's largest value (so far, where the whole is not known; infinite while that rises).
        step: optimizer steps done.
        total_steps: optimizer steps in all; None when open-ended.
        window: windows done before this one.
        length: optimizer steps in the window that has closed.
        windows_left: windows still to come; None when open-ended.
        shift: the learned shift, in coordinates.
        authority: how far the shift may go either way.
        down: how far the base may go down to its lower bound, in coordinates.
        spread: how far from the base the window looked: the largest absolute level of replicas that diverge, else the
            evidence's width.
        warming: whether the schedule is still rising.
        loss: mean training loss of the window that has closed, over replicas that stayed finite; None if unknown.
        point: the step of the point that the run has gone back to; None where it has not.
        decay_shift: how far weight decay stood from what was given in that window, either way, in its coordinates; of
            several knobs the largest, 0 where none is explored.
    """

    base: float = 1.0
    schedule_now: float = 1.0
    schedule_next: float = 1.0
    peak: float = 1.0
    step: int = 0
    total_steps: int | None = None
    window: int = 0
    length: int = 1
    windows_left: int | None = None
    shift: float = 0.0
    authority: float = math.inf
    down: float = math.inf
    spread: float = 0.0
    warming: bool = False
    loss: float | None = None
    point: int | None = None
    decay_shift: float = 0.0

    @property
    def fraction(self) -> float:
        """schedule_now / peak, the share of the peak that the schedule stands at; 1 without a peak."""
        return self.schedule_now / self.peak if self.peak > 0 else 1.0

    def before(self, share: float) -> bool:
        """Whether less than this share of the run is done; never where its end is not known."""
        return self.total_steps is not None and self.step < share * self.total_steps


@dataclass(frozen=True)
class Judgement:
    """What a window's estimate came to.

    Attributes:
        move: of the base, in coordinates.
        state: the controller's, which goes with it.
        rule: the kind of the rule that spoke; empty where none did.
        veto: the kind of the veto that held the move back; empty where none did. Of several it is the last to do so.
        power: to which the rest of the schedule is to be taken (`hdet.controllers.rules.Fall`), 1 as given; None leaves
            it as it is.
        alone: the part of the move that is the knob's own, where the rest is that of several (`Pooled`).
    """

    move: float
    state: Any
    rule: str = ""
    veto: str = ""
    power: float | None = None
    alone: float = 0.0

    @property
    def reasons(self) -> dict[str, str]:
        """Who decided, by `rule` and `veto`; {} where there is nothing to tell."""
        return {name: kind for name, kind in (("rule", self.rule), ("veto", self.veto)) if kind}


def left_alone(alone: float, cut: float) -> float:
    """What is left of a knob's own part of a move of which bounds or authority cut something off: it gives way first.

    >>> left_alone(1.0, 0.3), left_alone(1.0, 2.0), left_alone(1.0, -0.3), left_alone(-1.0, -0.3)
    (0.7, 0.0, 1.0, -0.7)
    """
    return alone - min(max(cut, min(alone, 0.0)), max(alone, 0.0))


class Controller(Spec, family="controller"):
    """The rule that turns estimates into moves of one base. Pure: the same input gives the same move.

    A move is in coordinates and positive towards larger values. The engine keeps shift + move within
    authority and bounds. After a window that taught nothing (an unknown or non-finite estimate) the move is 0
    and the state is returned as it was, but for what the run's first window tells of its weights (`Estimate.excess`).

    Subclass, decorate with `hdet.spec.register`, and it works in Python, in YAML and in ablations.
    """

    @property
    def needs_averaged(self) -> bool:
        """Whether it reads `Estimate.averaged`, which not all evidence has."""
        return False

    @property
    def shares(self) -> bool:
        """Whether what it judges by is of several knobs together, so that it moves alike for all of them."""
        return False

    def listens(self, step: int, total_steps: int | None) -> bool:
        """Whether an estimate at a step of the run could move it; if not, evidence need not be gathered."""
        return True

    def wants_curvature(self, slope: Estimate, *, averaged: bool = False) -> bool:
        """Whether a curvature could change what it does with this slope; if not, it need not be measured.

        Args:
            slope: an estimate without a curvature.
            averaged: it is one at window-averaged weights (`Estimate.averaged`).
        """
        return True

    @abstractmethod
    def start(self) -> Any:
        """The state before the first window: a frozen dataclass of numbers (see `hdet.controllers.state`)."""

    @abstractmethod
    def step(self, state: Any, estimate: Estimate, context: Context) -> tuple[float, Any]:
        """The move of the base for the next window, and the state that goes with it."""

    def judge(self, state: Any, estimate: Estimate, context: Context) -> Judgement:
        """What `step` gives, and who decided, for controllers that are made of parts.

        Raises:
            ConfigError: `step` gives something else than a move and a state.
        """
        made: object = self.step(state, estimate, context)
        if not isinstance(made, (tuple, list)) or len(made) != 2:
            raise ConfigError(f"{type(self).__name__}.step returned {made!r}; it returns a move and a state, as a pair")
        return Judgement(*made)

    def retreat(self, state: Any, context: Context, worked: float) -> tuple[float, Any]:
        """The move and state with which to go on after the run went back to an earlier point.

        That is when a guard went back (`hdet.Rewind`), or when all replicas became non-finite. By default what was
        gathered on the way that led astray is forgotten, and the base stays.

        Args:
            context: as for `step`, at the step the run goes on from.
            worked: the base's value when the run was at the earlier point; where all replicas became non-finite, that
                of the window in which they did.
        """
        return 0.0, self.start()

    def restart(self, state: Any, context: Context) -> tuple[float, Any]:
        """The move and state with which to go on after the run began anew from its first weights (`hdet.Rewind`).

        The base keeps what it has learnt. By default what was gathered besides is forgotten.

        Args:
            context: as for `step`, at the step the run goes on from.
        """
        return 0.0, self.start()


def settled(move: float, settle: float, context: Context) -> float:
    """The move, faded linearly to zero over the last `settle` share of the run (0: not at all).

    Late moves have little time to pay back what they cost, and a base that rests can be read off.

    >>> settled(0.4, 0.2, Context(step=90, total_steps=100))
    0.2
    """
    if settle == 0 or context.total_steps is None:
        return move
    left = max(context.total_steps - context.step, 0) / context.total_steps
    return move * min(1.0, left / settle)
