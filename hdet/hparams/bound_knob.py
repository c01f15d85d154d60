"""A knob at work: its declaration, where it is bound, its learned shift and this window's levels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass, replace
from functools import cached_property
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hdet.controllers import Context, Estimate
from hdet.controllers.controller import ROUNDING, left_alone
from hdet.controllers.state import from_plain, to_plain
from hdet.errors import CheckpointError, ConfigError, StepError
from hdet.hparams.bend import Bend
from hdet.hparams.binding import Binding, GroupBinding, Holding, Watchable
from hdet.hparams.knob import Knob
from hdet.hparams.learned import Learned
from hdet.hparams.schedule import Constant, sampled

MOST_PLANNED = 64
"""Steps whose values are worked out at once: one step's alone take several times as long, between two of training."""

OF_A_COURSE = (
    ". Bounds hold for the whole course, warm-up and fall as well (hdet's own if none was given); authority= bounds "
    "how far the value is moved from its course"
)


class BoundKnob:
    """The state of one knob in one engine.

    The value of replica r at step t is `clip(apply(base(t), centre + levels[r]))`, where
    `base(t) = clip(apply(schedule(t), shift))`. Near a bound the levels shrink together, so that they go on
    summing to zero and none lies outside.

    Attributes:
        spec: the declaration.
        shift: the learned displacement from the schedule, in coordinate units.
        bend: how the schedule's fall differs from the given one.
        levels: [N] offsets of this window, summing to zero; zeros where the knob does not diverge.
        centre: offset of the levels' mean from the base (one-sided spreads).
        reasons: why the controller made its last move (`Controller.judge`).
        alone: the part of that move which is the knob's own (`Judgement.alone`).
        stays_until: before this step `put_in_force` has nothing to do, as long as `held` is still there.
        held: what has to be where it was put for that.
    """

    def __init__(self, spec: Knob, bindings: Sequence[Binding], n: int) -> None:
        if spec.controller is None or spec.evidence is None:
            raise ConfigError(f"{spec.label}: its declaration is not complete (hdet.engine.defaults.complete)")
        for binding in bindings:
            if not isinstance(binding, Binding):
                raise ConfigError(
                    f"{spec.label}: {type(spec).__name__}.bind returned {binding!r}; it returns a binding, such as "
                    f"hdet.hparams.binding.ModelBinding, with read, write, overwritten and targets"
                )
        self.spec = spec
        self.controller = spec.controller
        self.evidence = spec.evidence
        self.name = spec.label
        self.bindings = list(bindings)
        self.schedule = spec.schedule if spec.schedule is not None else _base(self.bindings[0], self.name)
        self.shift = spec.initial_shift
        self.bend = Bend()
        self._counted = self.shift  # by the moves that were returned
        self.state = self.controller.start()
        if not is_dataclass(self.state):
            raise ConfigError(
                f"{self.name}: {type(self.controller).__name__}.start() gave a {type(self.state).__name__}, and a "
                f"state is a frozen dataclass of numbers, so that a checkpoint can hold it"
            )
        self.reasons: dict[str, str] = {}
        self.alone = 0.0
        self._placed: tuple[int, float, float, float]  # step, shift, base and reach, as last worked out
        self._valued: tuple[float, Sequence[int], list[float]] | None  # base, replicas and their values, the same
        self._planned: list[list[float]] = []  # values of the models of this process, by step
        self._planned_at = (0, 0.0)  # the first of these steps, and the shift that they were worked out for
        self._coming = 1  # steps to plan next
        self.stays_until: float = 0
        self.held: list[Holding] = []
        self._still = np.zeros(n)
        self._still.setflags(write=False)
        self.spread(self._still, 0.0)
        self._written: list[float | None] = [None] * len(self.bindings)
        self._fell = False  # whether its schedule has been seen to fall, of one whose course is known
        total = self.schedule.total_steps
        course = sampled(self.schedule)
        self.peak = self.schedule.nominal_peak()
        low, high = spec.bounds
        if min(course) < low or max(course) > high:
            outside = min(course) if min(course) < low else max(course)
            told = "" if isinstance(self.schedule, Constant) else OF_A_COURSE
            raise ConfigError(
                f"{self.name}: its schedule reaches {outside:g}, outside the bounds {spec.bounds}; "
                f"give bounds=({min(low, outside):g}, {max(high, outside):g}) or another base{told}"
            )
        # Of a schedule without an end only the start is known, and a warm-up may start at 0.
        known = total is not None or isinstance(self.schedule, Constant)
        if known and not self._movable(self.peak):
            raise ConfigError(
                f"{self.name}: its base is {self.peak:g}, which {type(spec.space).__name__} cannot move; "
                f"give it a schedule with another value, or another space"
            )

    def base(self, step: int) -> float:
        """The shared centre at a step, within bounds."""
        low, high = self.spec.bounds
        value = self.bend.of(self.schedule(step))
        if self.shift != 0.0:
            value = self.spec.space.apply(value, self.shift)
        return min(max(value, low), high)

    def course(self, start: int, stop: int) -> list[float]:
        """The base at each step from `start` to `stop`, without `stop`; one number alone where it stays the same."""
        if isinstance(self.schedule, Constant):
            return [self.base(start)]
        bases = [self.base(step) for step in range(start, stop)]
        return bases[:1] if all(base == bases[0] for base in bases) else bases

    def __repr__(self) -> str:
        return f"<BoundKnob {self.name}: {self.learned}>"

    @property
    def learned(self) -> Learned:
        """What the knob was set to and what it has been moved to, both at the peak of its schedule."""
        low, high = self.spec.bounds
        moved = self.spec.space.apply(self.peak, self.shift) if self.shift != 0.0 else self.peak
        return Learned(start=self.peak, value=min(max(moved, low), high))

    @property
    def looked_at(self) -> float:
        """How far from the base evidence looks for which no replicas diverge, in coordinate units."""
        return float(getattr(self.evidence, "width", self.spec.spread.width))

    def reach(self, base: float) -> float:
        """The factor in [0, 1] by which all levels shrink at a base, so that none leaves the bounds."""
        if not self._explored:
            return 1.0
        down, up = self.spec.space.room(base, self.spec.bounds)
        lowest, highest = self._ends
        factor = 1.0
        if -lowest > down:
            factor = min(factor, down / -lowest)
        if highest > up:
            factor = min(factor, up / highest)
        return factor

    def placed(self, step: int) -> tuple[float, float]:
        """`base` at a step and `reach` there; a step is asked about several times, and worked out once."""
        if self._placed[:2] != (step, self.shift):
            base = self.base(step)
            stays = self._placed[0] >= 0 and base == self._placed[2]
            self._placed = (step, self.shift, base, self._placed[3] if stays else self.reach(base))
        return self._placed[2:]

    def reaches(self, start: int, stop: int) -> Iterable[float]:
        """`reach` at each step from `start` to `stop`, without `stop`."""
        if isinstance(self.schedule, Constant):
            return repeat(self.placed(start)[1], stop - start)
        return (self.placed(step)[1] for step in range(start, stop))

    def values(self, step: int, indices: Sequence[int]) -> list[float]:
        """The values of some replicas at a step, none outside the bounds."""
        if not self._explored and self.centre == 0.0:
            return [self.placed(step)[0]] * len(indices)
        base = self.placed(step)[0]
        if self._valued is None or self._valued[:2] != (base, indices):
            offsets = [self.centre + self.levels.item(index) for index in indices]
            self._valued = (base, indices, self._at(step, offsets))
        return list(self._valued[2])

    def _at(self, step: int, offsets: Sequence[float]) -> list[float]:
        """The values of replicas whose levels lie so far from the base."""
        base, reach = self.placed(step)
        low, high = self.spec.bounds
        apply = self.spec.space.apply
        # Many replicas have few levels, and each is worked out once.
        at = {offset: min(max(apply(base, reach * offset), low), high) for offset in set(offsets)}
        return [at[offset] for offset in offsets]

    def range(self, step: int) -> tuple[float, float]:
        """The lowest and the highest value of any replica at a step."""
        low, high = self._at(step, self._ends)
        return low, high

    def displaced(self, step: int, offset: float) -> float:
        """The base moved by an offset in coordinate units, within bounds."""
        low, high = self.spec.bounds
        return min(max(self.spec.space.apply(self.base(step), offset), low), high)

    def write(self, host: int, value: float) -> None:
        """Put a value in force in one of this process's models, unless it is already.

        Raises:
            StepError: something else has written the scalar since.
        """
        last = self._written[host]
        if last is not None:
            self._require_untouched(host, last)
        if last != value:
            self.bindings[host].write(value)
            self._written[host] = value
            self.stays_until = 0

    @cached_property
    def _watchable(self) -> list[Watchable]:
        """Of the bindings those that may be looked at, which takes long to ask."""
        return [own for own in self.bindings if isinstance(own, Watchable)]

    def put_in_force(self, step: int, places: Sequence[int]) -> None:
        """Write the values of a step into this process's models, of which each is that of the replica at its place.

        Raises:
            StepError: something else has written the scalar since.
        """
        first, shift = self._planned_at
        if not 0 <= step - first < len(self._planned) or shift != self.shift:
            first = self._plan(step, places)
        written = self._written
        for host, value in enumerate(self._planned[step - first]):
            # As a rule nothing changes from step to step, and nothing is called to find that out but this.
            if value != written[host] or self.bindings[host].overwritten(value) is not None:
                self.write(host, value)
        self._settle(step)

    def _settle(self, step: int) -> None:
        """Know for how long the values in force stay the same, and what would be another object otherwise."""
        first, rows = self._planned_at[0], self._planned
        following = step - first + 1
        while following < len(rows) and rows[following] == rows[step - first]:
            following += 1
        is_constant = isinstance(self.schedule, Constant) and self.schedule.foreknown
        self.stays_until = math.inf if is_constant else first + following
        if self.stays_until == step + 1:
            return
        self.held = [Holding(vars(self), "shift", self.shift)]
        if len(self._watchable) < len(self.bindings):
            self.stays_until = 0
            return
        for binding in self._watchable:
            found = binding.holdings()
            if found is None:
                self.stays_until = 0
                return
            self.held += found

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "stays_until": 0, "held": []}  # a copy holds objects of its own

    def _plan(self, step: int, places: Sequence[int]) -> int:
        """Work out the values from a step on, of the more steps the longer nothing has changed. Returns the step."""
        steps = self._coming if self.schedule.foreknown else 1
        self._planned = [self.values(coming, places) for coming in range(step, step + steps)]
        self._planned_at = (step, self.shift)
        self._coming = min(2 * steps, MOST_PLANNED)
        return step

    def _require_untouched(self, host: int, last: float) -> None:
        other = self.bindings[host].overwritten(last)
        if other is None:
            return
        raise StepError(
            f"{self.name}: hdet put {other.expected:g} into {other.entry}, and something else has made it "
            f"{other.found:g}; two that write one number overwrite each other. If a scheduler did, drop it and give "
            f"the knob its course (schedule=hdet.schedules.OneCycle(...) or another), or let it stay and ride on it by "
            f"hdet.attach(..., scheduler=scheduler); if you did, as by loading an optimizer's state, call "
            f"engine.reapply()"
        )

    def spread(self, levels: NDArray[np.float64], centre: float) -> None:
        """Take up a window's levels."""
        self.levels = levels
        self.centre = centre
        # What every step reads.
        low, high = (float(levels.min()), float(levels.max())) if len(levels) else (0.0, 0.0)
        self._widest = (low, high)
        self._explored = low != 0.0 or high != 0.0
        self._ends = (centre + low, centre + high)
        self._valued = None
        self._replan()

    def ahead(self, estimate: Estimate) -> float:
        """How far ahead of the base evidence looked: levels near a bound lie off it too, and look at nothing ahead."""
        return estimate.offset if self.evidence.looks_ahead else 0.0

    def judge(self, estimate: Estimate, run: Context) -> float:
        """Let the controller move the base. Returns the move made, after authority and bounds, in coordinate units.

        Where the schedule stood at what nothing moves all window long, as a rate at 0, nothing was in force that the
        evidence could be of, unless it is of others too (`Controller.shares`): the controller hears of no slope.

        Args:
            run: where the run stands; what is the knob's own is filled in here.
        """
        if not self.controller.shares and self._slept(run.step - run.length, run.step):
            estimate = replace(Estimate.nothing(), excess=estimate.excess, own_excess=estimate.own_excess)
        if estimate.offset != self.ahead(estimate):
            estimate = replace(estimate, offset=0.0)
        judged = self.controller.judge(self.state, estimate, self._context(run))
        self.reasons, asked = judged.reasons, self._answered(judged.move, judged.state)
        move = self._move(asked)
        self.alone = left_alone(judged.alone, asked - move)
        if judged.power is not None:
            if not 0.0 < judged.power < math.inf:
                raise ConfigError(f"{self.name}: {type(self.controller).__name__} asked for a power of {judged.power}")
            self._take(self.bend.to(judged.power, self.schedule(run.step)))
        return move

    def retreat(self, worked: float, run: Context) -> float:
        """The run went back to a point at which the base was `worked`. Returns the move made, as `judge` does."""
        return self._move(self._answered(*self.controller.retreat(self.state, self._context(_between(run)), worked)))

    def restart(self, run: Context) -> float:
        """The run began anew from its first weights. Returns the move made, as `judge` does."""
        return self._move(self._answered(*self.controller.restart(self.state, self._context(_between(run)))))

    def _slept(self, start: int, stop: int) -> bool:
        """Whether no shift would have changed the base at any step from `start` to `stop`, without `stop`."""
        return not any(self._movable(self.bend.of(self.schedule(step))) for step in range(start, stop)) and start < stop

    def rises(self, start: int, stop: int) -> bool:
        """Whether the schedule comes to lie higher from one step to another, or stands on a stair of its warm-up.

        A warm-up that is stepped once an epoch is level within it: so a schedule whose course is known is on its way up
        as long as it has never fallen and lies below its peak. One that nothing moves, as a rate of 0, is no stair.
        """
        before, after = self.schedule(start), self.schedule(stop)
        if before != after or self.schedule.total_steps is None or self._fell:
            return after > before
        return after < self.peak and self._movable(after)

    def _movable(self, value: float) -> bool:
        return any(self.spec.space.apply(value, shift) != value for shift in (0.1, -0.1))

    def _context(self, run: Context) -> Context:
        step = run.step
        now, following = (self.bend.of(self.schedule(at)) for at in (max(step - 1, 0), step))
        if self.schedule.total_steps is None:
            self.peak = max(self.peak, now)  # what follows is a guess
        elif not self._fell:
            opened = self.bend.of(self.schedule(max(step - run.length, 0)))
            self._fell = following < max(opened, now)
        base = self.base(max(step - 1, 0))
        return replace(
            run,
            base=base,
            down=self.spec.space.room(base, self.spec.bounds)[0],
            schedule_now=now,
            schedule_next=following,
            # How far a rise goes whose end is not known, nobody knows: it stands at no known share of its peak.
            peak=math.inf if following > now and self.schedule.total_steps is None else self.peak,
            shift=self.shift,
            authority=self.spec.authority,
            spread=max(abs(end) for end in self._widest) if self.evidence.diverges else self.looked_at,
            warming=self.rises(max(step - 1, 0), step),
        )

    def _answered(self, move: Any, state: object) -> float:
        """The move that the controller asks for; its state is kept.

        Raises:
            ConfigError: the one is no finite number, or the other is of another kind than that of the start.
        """
        if not isinstance(state, type(self.state)):
            raise ConfigError(
                f"{self.name}: {type(self.controller).__name__} gave the state {state!r:.60}, where its start() gave a "
                f"{type(self.state).__name__}; return one of these, so that a checkpoint can hold it"
            )
        try:
            asked = math.nan if isinstance(move, (str, bool)) else float(move)
        except (TypeError, ValueError):
            asked = math.nan
        if not math.isfinite(asked):
            raise ConfigError(f"{self.name}: {type(self.controller).__name__} moved by {move!r}")
        self.state = state
        return asked

    def _move(self, move: float) -> float:
        self.shift = self._within(self.shift + move)
        made = self.shift - self._counted
        if abs(made) < ROUNDING:
            return 0.0  # counted with the next move
        self._counted = self.shift
        return made

    @property
    def learned_numbers(self) -> tuple[float, float, float]:
        """What has been learned: the shift, and the bend's two numbers."""
        return self.shift, self.bend.power, self.bend.log_factor

    def agree(self, shift: float, bend: Bend) -> None:
        """Take what others that explore the same agreed on; the next move that is returned counts the shift."""
        self.shift = self._within(shift)
        self._take(bend)

    def _take(self, bend: Bend) -> None:
        if bend != self.bend:
            self.bend = bend
            self._replan()

    def _replan(self) -> None:
        """Forget what was worked out for coming steps."""
        self._placed = (-1, 0.0, 0.0, 1.0)
        self._planned, self._coming = [], 1
        self.stays_until = 0

    def _within(self, shift: float) -> float:
        wanted = min(max(shift, -self.spec.authority), self.spec.authority)
        # A shift past which the peak would only press against a bound is cut back to it: no windup.
        down, up = self.spec.space.room(self.peak, self.spec.bounds)
        return min(max(wanted, -down), up)

    def rest(self) -> None:
        """End exploration: every replica takes the base."""
        self.spread(self._still, 0.0)

    def forget(self) -> None:
        """Assume nothing about the values in force, nor about the schedule: either may have been changed."""
        self._written = [None] * len(self.bindings)
        self._replan()

    def state_dict(self) -> dict[str, Any]:
        """Shift, controller state and a base that was read, as plain numbers; levels follow from seed and window."""
        state, bend = to_plain(self.state), to_plain(self.bend)
        plain = {"shift": self.shift, "bend": bend, "peak": self.peak, "fell": self._fell, "controller": state}
        return plain if self._counted == self.shift else {**plain, "counted": self._counted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`.

        Raises:
            CheckpointError: a shift that is no number or beyond this knob's authority.
        """
        shift = float(state["shift"])
        if not abs(shift) <= self.spec.authority * (1.0 + 1e-12):
            raise CheckpointError(
                f"{self.name}: the checkpoint has moved it by {shift:g}, and its authority is {self.spec.authority:g} "
                f"(in coordinate units); declare authority={abs(shift):g} or more to resume"
            )
        self.shift = shift
        self.bend = from_plain(Bend(), state["bend"]) if "bend" in state else Bend()
        self._fell = bool(state.get("fell", False))
        counted = state.get("counted")
        self._counted = shift if counted is None else float(counted)
        if self.schedule.total_steps is None:
            self.peak = float(state["peak"])
        if self.spec.schedule is None:
            # What was read this time may be an optimizer loaded in the middle of the run, already shifted.
            self.schedule = Constant(self.peak)
        self.state = from_plain(self.state, state["controller"])
        self.forget()


def _between(run: Context) -> Context:
    """The same place in the run, with no window just closed: the run went back."""
    return replace(run, windows_left=None, length=0, loss=None)


def _base(binding: Binding, name: str) -> Constant:
    """What a knob without a schedule starts from."""
    try:
        return Constant(binding.base() if isinstance(binding, GroupBinding) else binding.read())
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
