"""Schedules: the planned value of a knob at each optimizer step, before any learned shift.

A schedule is a pure function of the step t = 0, 1, 2, ...; it keeps no count and owns no optimizer, so it can
be plotted before a run and asked for any step after one. Past its end it holds its last value.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from importlib import import_module
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from hdet.errors import ConfigError
from hdet.hparams.recorded import recorded_course
from hdet.record import WindowRecord
from hdet.spec import Spec, register

NEAR_PEAK = 0.95
MUCH_EARLIER = 0.8
SAMPLES = 2000
"""Steps at which a schedule's smallest and largest values are looked for; at every step of a run of so many."""


class Schedule(Spec, family="schedule"):
    """t -> value. A new schedule gives `__call__`, and `total_steps` as a field or a property.

    Attributes:
        foreknown: whether the values of coming steps are known already, and are asked for up to 64 steps ahead. False
            where a class does not say it itself: a schedule may read what changes while training goes on.
    """

    foreknown: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.foreknown = cls.__dict__.get("foreknown", False)

    if TYPE_CHECKING:
        # Not at run time: pydantic would warn of every field that shadows it.
        @property
        def total_steps(self) -> int | None:
            """The number of steps planned; None for a schedule without an end."""

    @abstractmethod
    def __call__(self, t: int) -> float:
        """The value at optimizer step t (0-based), in the knob's own unit.

        Raises:
            ConfigError: t is negative.
        """

    def nominal_peak(self) -> float:
        """The scale that a knob was set to: the largest value, as `sampled` sees it."""
        return max(sampled(self))

    def steps_before(self) -> int:
        """How many steps it had counted before step 0; 0 unless it is somebody else's, who had begun already."""
        return 0

    def with_warmup(self, steps: int) -> Schedule:
        """`LinearWarmup` of this schedule, or the schedule itself where it warms up for long enough."""
        warmed = LinearWarmup(self, steps)
        return warmed if warmed.is_needed else self


def sampled(schedule: Schedule) -> list[float]:
    """The values at up to about `SAMPLES` steps, evenly spaced; of a schedule without an end, at its first.

    Raises:
        ConfigError: one of them is no number.
    """
    total = schedule.total_steps
    steps = range(0, total or 1, max(1, (total or 1) // SAMPLES))
    values = [schedule(t) for t in steps]
    for t, value in zip(steps, values, strict=True):
        if not isinstance(value, Real):
            raise ConfigError(f"{type(schedule).__name__} gave {value!r} at step {t}; a schedule gives a float")
    return values


@register
class Constant(Schedule):
    """The same value at every step.

    >>> Constant(0.1)(1000)
    0.1
    """

    foreknown: ClassVar[bool] = True

    value: float = Field(kw_only=False)

    @property
    def total_steps(self) -> None:
        return None

    def __call__(self, t: int) -> float:
        return self.value


@register
class OneCycle(Schedule):
    """Up to `max_lr`, down to next to nothing: `torch.optim.lr_scheduler.OneCycleLR`, bit for bit.

    From initial = max_lr / div_factor to max_lr in pct_start total_steps - 1 steps, then to
    initial / final_div_factor at step total_steps - 1; with `three_phase` by way of initial, in as many steps
    as it rose. Between the ends a, b of a phase, at fraction p of it:

        cos:     b + (a - b) / 2 (cos(pi p) + 1)
        linear:  (b - a) p + a

    With `cycle_momentum`, `momentum(t)` moves against the rate, between `max_momentum` and `base_momentum`.
    Source: Smith & Topin 2017, arXiv 1708.07120.

    >>> schedule = OneCycle(1.0, total_steps=100)
    >>> [round(schedule(t), 9) for t in (0, 29, 99)]
    [0.04, 1.0, 4e-06]
    """

    foreknown: ClassVar[bool] = True

    max_lr: float = Field(ge=0, kw_only=False)
    total_steps: int = Field(gt=0, kw_only=False)
    pct_start: float = Field(default=0.3, ge=0, le=1)
    anneal_strategy: Literal["cos", "linear"] = "cos"
    div_factor: float = Field(default=25.0, gt=0)
    final_div_factor: float = Field(default=1e4, gt=0)
    three_phase: bool = False
    cycle_momentum: bool = False
    base_momentum: float = Field(default=0.85, ge=0, le=1)
    max_momentum: float = Field(default=0.95, ge=0, le=1)

    @model_validator(mode="after")
    def _rises_somewhere(self) -> OneCycle:
        if self.pct_start * self.total_steps == 1.0:
            raise ValueError("pct_start * total_steps is 1, a rise of no steps; give a slightly larger pct_start")
        return self

    def __call__(self, t: int) -> float:
        phase, fraction = self._phase(t)
        initial = self.max_lr / self.div_factor
        lowest = initial / self.final_div_factor
        ends = (initial, self.max_lr, initial if self.three_phase else lowest, lowest)
        return self._between(ends[phase], ends[phase + 1], fraction)

    def momentum(self, t: int) -> float | None:
        """The momentum (or beta1) at step t, against the rate; None unless `cycle_momentum`."""
        if not self.cycle_momentum:
            return None
        phase, fraction = self._phase(t)
        ends = (self.max_momentum, self.base_momentum, self.max_momentum, self.max_momentum)
        return self._between(ends[phase], ends[phase + 1], fraction)

    def _phase(self, t: int) -> tuple[int, float]:
        """Which phase step t is in, and the fraction of it gone by: torch's arithmetic, in its order."""
        t = _held(t, self.total_steps)
        top = float(self.pct_start * self.total_steps) - 1
        if t <= top:
            return 0, t / top
        if self.three_phase:
            bottom = float(2 * self.pct_start * self.total_steps) - 2
            if t <= bottom:
                return 1, (t - top) / (bottom - top)
            return 2, (t - bottom) / (self.total_steps - 1 - bottom)
        return 1, (t - top) / (self.total_steps - 1 - top)

    def _between(self, start: float, end: float, fraction: float) -> float:
        if self.anneal_strategy == "cos":
            return end + (start - end) / 2.0 * (math.cos(math.pi * fraction) + 1)
        return (end - start) * fraction + start


@register
class HeldOneCycle(OneCycle):
    """`OneCycle` up to step `held_from`, and from there on the value it has at that step.

    In the paper the controller's base takes the cycle's place once control begins. `held_from` is the first
    step of the first controlled window: the end of the first window at or after the controller's
    `warmup_steps`.

    >>> HeldOneCycle(1.0, total_steps=100, held_from=29)(90)
    1.0
    """

    kind: ClassVar[str] = "held_one_cycle"
    foreknown: ClassVar[bool] = True

    held_from: int = Field(ge=0)

    def __call__(self, t: int) -> float:
        return super().__call__(min(t, self.held_from) if t >= 0 else t)


class WarmedUp(Schedule):
    """What `Cosine`, `LinearDecay` and `WSD` share: a linear rise to `peak`, then a way down to `floor`.

    With W = round(warmup total_steps): value(t) = floor + (peak - floor) (t + 1) / W for t < W, so that the
    peak is reached at step W - 1. The floor is the limit at t = total_steps, when training is over: no step
    is spent at it, and with floor 0 every value is positive.
    """

    peak: float = Field(ge=0, kw_only=False)
    total_steps: int = Field(gt=0, kw_only=False)
    warmup: float = Field(default=0.3, ge=0, le=1)
    floor: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _floor_is_below(self) -> WarmedUp:
        if self.floor > self.peak:
            raise ValueError(f"floor must not exceed peak; got floor={self.floor}, peak={self.peak}")
        return self

    def __call__(self, t: int) -> float:
        t = _held(t, self.total_steps)
        rise = round(self.warmup * self.total_steps)
        fraction = (t + 1) / rise if t < rise else self._remaining(t, rise)
        return self.floor + (self.peak - self.floor) * fraction

    @abstractmethod
    def _remaining(self, t: int, rise: int) -> float:
        """The fraction of peak - floor left at step t >= rise: 1 at t = rise, 0 at t = total_steps."""


@register
class Cosine(WarmedUp):
    """A linear rise over `warmup` (a fraction of the steps), then half a cosine:

        value(t) = floor + (peak - floor) (1 + cos(pi (t - W) / (total_steps - W))) / 2.

    Source: Loshchilov & Hutter 2017, arXiv 1608.03983.

    >>> [round(Cosine(1.0, total_steps=10, warmup=0.2)(t), 3) for t in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.5, 0.038]
    """

    foreknown: ClassVar[bool] = True

    def _remaining(self, t: int, rise: int) -> float:
        return (1.0 + math.cos(math.pi * (t - rise) / (self.total_steps - rise))) / 2.0


@register
class LinearDecay(WarmedUp):
    """A linear rise over `warmup` (a fraction of the steps), then a straight line down:

        value(t) = floor + (peak - floor) (total_steps - t) / (total_steps - W).

    >>> [LinearDecay(1.0, total_steps=10, warmup=0.2)(t) for t in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.5, 0.125]
    """

    kind: ClassVar[str] = "linear"
    foreknown: ClassVar[bool] = True

    def _remaining(self, t: int, rise: int) -> float:
        return (self.total_steps - t) / (self.total_steps - rise)


@register
class WSD(WarmedUp):
    """Warm up, stay, decay: a rise over `warmup`, the peak, a straight line down over the last `decay` (both
    fractions of the steps). With D = round(decay total_steps), over the last D steps

        value(t) = floor + (peak - floor) (total_steps - t) / D.

    Source: Hu et al. 2024, arXiv 2404.06395; Hagele et al. 2024, arXiv 2405.18392.

    >>> [WSD(1.0, total_steps=10, warmup=0.2, decay=0.4)(t) for t in (0, 1, 5, 6, 8, 9)]
    [0.5, 1.0, 1.0, 1.0, 0.5, 0.25]
    """

    foreknown: ClassVar[bool] = True

    warmup: float = Field(default=0.1, ge=0, le=1)
    decay: float = Field(default=0.2, ge=0, le=1)

    @model_validator(mode="after")
    def _fits(self) -> WSD:
        if self.warmup + self.decay > 1.0:
            raise ValueError(f"warmup + decay must not exceed 1; got {self.warmup} + {self.decay}")
        return self

    def _remaining(self, t: int, rise: int) -> float:
        left, fall = self.total_steps - t, round(self.decay * self.total_steps)
        return left / fall if left < fall else 1.0


@register
class LinearWarmup(Schedule):
    """Another schedule, with a linear warm-up of at least `steps` steps.

    A schedule that comes near its peak much earlier (to 95 % of it before 80 % of these steps) is held below a straight
    line: for t < steps

        value(t) = min(schedule(t), peak (t + 1) / steps).

    Any other stays as it is. The peak is the largest value of the whole schedule; of one without an end, of its first
    `steps` steps. Where the schedule falls before the line has risen, no step has that value.

    >>> [LinearWarmup(Cosine(1.0, total_steps=10, warmup=0.0), 4)(t) for t in (0, 1, 2, 5)]
    [0.25, 0.5, 0.75, 0.5]
    >>> LinearWarmup(Cosine(1.0, total_steps=10, warmup=0.5), 4)(0)
    0.2
    """

    schedule: Schedule = Field(kw_only=False)
    steps: int = Field(ge=0, kw_only=False)

    @property
    def foreknown(self) -> bool:  # type: ignore[override]
        """Whether the schedule's are."""
        return self.schedule.foreknown

    @property
    def total_steps(self) -> int | None:
        return self.schedule.total_steps

    @property
    def is_needed(self) -> bool:
        """Whether the schedule comes near its peak too early."""
        return self._line is not None

    def nominal_peak(self) -> float:
        """The schedule's own."""
        return self.schedule.nominal_peak()

    def __call__(self, t: int) -> float:
        t = _held(t, self.total_steps)
        value = self.schedule(t)
        return value if t >= self.steps or self._line is None else min(value, self._line * (t + 1))

    @cached_property
    def _line(self) -> float | None:
        """How far the line rises in a step."""
        early = [self.schedule(t) for t in range(min(self.steps, self.total_steps or self.steps))]
        return rise(early, max([self.schedule.nominal_peak(), *early]), self.steps)


def rise(early: Sequence[float], peak: float, steps: int) -> float | None:
    """How far a linear warm-up of `steps` steps rises in one; None where the schedule needs none.

    Args:
        early: the schedule's values at its first steps, `steps` of them at most.
        peak: its largest.
    """
    needed = any(value >= NEAR_PEAK * peak for value in early[: int(MUCH_EARLIER * steps)])
    return peak / steps if needed else None


@register
class Replay(Schedule):
    """A value for each step, as another run recorded them; the last is held.

    `Replay.of` reads them off a run's history. An optimizer that is made with lr=1.0 trains by it without hdet:
    `torch.optim.lr_scheduler.LambdaLR(optimizer, hdet.schedules.Replay.of(history, "learning_rate"))`.
    `hdet.ReplayLR` replays several knobs.

    >>> [Replay((0.1, 0.3, 0.2))(t) for t in (0, 1, 2, 3)]
    [0.1, 0.3, 0.2, 0.2]
    """

    foreknown: ClassVar[bool] = True

    values: tuple[float, ...] = Field(min_length=1, kw_only=False)

    def __repr__(self) -> str:
        return f"<Replay of {len(self.values)} steps, {self.values[0]:.4g} to {self.values[-1]:.4g}>"

    @classmethod
    def of(cls, windows: Iterable[WindowRecord], knob: str, total_steps: int | None = None) -> Replay:
        """The course that a knob took in a run, to the last bit.

        Where the run went back to an earlier point, the steps that were thrown away are left out, and the others are
        stretched over its length.

        Args:
            windows: the run's, from the first: a `hdet.History`.
            knob: as the history names it.
            total_steps: stretch or shrink the course to this many steps; by default it has the run's.

        Raises:
            ConfigError: the history does not hold the knob's base at every step from the first.

        >>> import hdet
        >>> rates = [0.1, 0.3, 0.2]
        >>> window = hdet.history.WindowRecord(0, 0, 3, {"lr": 0.2}, {}, [1.0], {}, {}, False, course={"lr": rates})
        >>> hdet.schedules.Replay.of([window], "lr").values
        (0.1, 0.3, 0.2)
        >>> [round(value, 2) for value in hdet.schedules.Replay.of([window], "lr", total_steps=5).values]
        [0.1, 0.2, 0.3, 0.25, 0.2]
        """
        return cls(recorded_course(windows, knob, total_steps))

    @property
    def total_steps(self) -> int:
        return len(self.values)

    def __call__(self, t: int) -> float:
        return self.values[_held(t, len(self.values))]


@register
class FromCallable(Schedule):
    """Any function t -> value, named by "module:function" so that YAML and checkpoints can hold it.

    The module is imported at the first call. With `total_steps` the function is not asked for later steps.

    >>> FromCallable("math:sqrt")(16)
    4.0
    """

    path: str = Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*$", kw_only=False)
    total_steps: int | None = Field(default=None, gt=0)

    def __call__(self, t: int) -> float:
        """What the function returns for step t.

        Raises:
            ConfigError: t is negative, there is no such function, or it does not return a finite number.
        """
        t = _held(t, self.total_steps)
        value = _resolve(self.path)(t)
        if getattr(value, "ndim", None) == 0:  # NumPy's numbers, and arrays and tensors of one
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ConfigError(f"schedule {self.path!r} must return a finite number; it gave {value!r} at step {t}")
        return float(value)


def _held(t: int, total_steps: int | None) -> int:
    """The step to evaluate at: t, or the last step once the schedule is over."""
    if t < 0:
        raise ConfigError(f"schedules begin at step 0; asked for step {t}")
    return t if total_steps is None or t < total_steps else total_steps - 1


@lru_cache(maxsize=64)
def _resolve(path: str) -> Callable[[int], Any]:
    module, _, attribute = path.partition(":")
    try:
        found: Any = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"schedule {path!r} is not 'module:function': {error}") from error
    if not callable(found):
        raise ConfigError(f"schedule {path!r} names {found!r}, which cannot be called")
    return found  # type: ignore[no-any-return]
