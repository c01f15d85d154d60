"""What somebody else writes into an optimizer: told step by step, and foreseen where a scheduler can be simulated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from pydantic import PrivateAttr
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR

from hdet.errors import ConfigError, StepError
from hdet.hparams import Schedule
from hdet.hparams.schedule import rise
from hdet.replicas.parallel import world

Row = Sequence[float]
Function = Callable[[int], float]


class Course:
    """The values that all parameter groups hold under one entry, by optimizer step.

    Attributes:
        forecast: the values after 0, 1, 2, ... steps of the scheduler, counted from where it was simulated; empty where
            nothing is foreseen.
        steps_between: optimizer steps between two steps of the scheduler.
        steps_each: scheduler steps made then.
        peaks: of each group, the highest foreseen value.
        warmup_steps: of the warm-up that `Told.with_warmup` asks for. A run that goes on has it from its checkpoint.
        lines: how far this warm-up rises in a step, by group; None where a group needs none.
        steps_before: optimizer steps, at the most, that the scheduler had counted before it was simulated.
        warms_up: whether values that have just risen are taken to go on rising, as a rate's in a warm-up. Of a
            probability, as Adam's betas are, they are not: it could leave its domain.
    """

    def __init__(
        self,
        first: Row,
        forecast: Sequence[Row] = (),
        steps_between: int = 1,
        steps_each: int = 1,
        steps_before: int = 0,
        warms_up: bool = True,
    ) -> None:
        self.told: dict[int, list[float]] = {0: list(first)}
        self._foresee(forecast)
        self.warmup_steps = 0
        self.lines: list[float | None] = []
        self.steps_between = steps_between
        self.steps_each = steps_each
        self.steps_before = steps_before
        self.warms_up = warms_up
        self._last = 0  # the last step told
        self._position = 0
        self._moved_at = 0

    def at(self, step: int) -> list[float]:
        """The values at a step: as told, else as foreseen, else the last that were told.

        Where nothing is foreseen and values that warm up have just risen, they are taken to go on rising for a step: so
        who asks about the coming step sees a warm-up.
        """
        if step in self.told:
            return self.told[step]
        last = self._last
        if step < last:
            raise ConfigError(f"the optimizer's values at step {step} are not remembered (only {sorted(self.told)})")
        if self.forecast:
            steps = (step - self._moved_at) // self.steps_between * self.steps_each
            return self.foreseen(self._position + steps)
        if not self.warms_up:
            return self.told[last]
        before = self.told.get(last - 1, self.told[last])
        return [now + max(0.0, now - then) for now, then in zip(self.told[last], before, strict=True)]

    @property
    def latest(self) -> list[float]:
        """The values that were told last."""
        return self.told[self._last]

    def foreseen(self, position: int) -> list[float]:
        """The values after that many steps of the scheduler; the last of them once it has ended."""
        return self.forecast[min(max(position, 0), len(self.forecast) - 1)]

    def warm_up(self, steps: int) -> None:
        """The warm-up that `Told.with_warmup` asks for has so many steps."""
        ticks = (step // self.steps_between * self.steps_each for step in range(steps))
        early = zip(*(self.foreseen(tick) for tick in ticks), strict=True)
        self.warmup_steps = steps
        self.lines = [rise(column, peak, steps) for column, peak in zip(early, self.peaks, strict=False)]

    def _foresee(self, forecast: Sequence[Row]) -> None:
        self.forecast = [list(row) for row in forecast]
        self.peaks = [max(column) for column in zip(*self.forecast, strict=True)]

    def tell(self, step: int, values: Row, position: int = 0) -> None:
        """The values at a step are these, and the scheduler has made `position` steps."""
        self.told[step] = list(values)
        self._last = max(self._last, step)
        if position != self._position:
            self._position, self._moved_at = position, step

    def forget_before(self, step: int) -> None:
        """Keep the steps from one on, and the last one told."""
        self.told = {at: values for at, values in self.told.items() if at >= step or at == self._last}

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, and the forecast as one tensor."""
        return {
            "told": {step: list(values) for step, values in self.told.items()},
            "forecast": torch.tensor(self.forecast, dtype=torch.float64),
            "position": self._position,
            "moved_at": self._moved_at,
            "warmup_steps": self.warmup_steps,
        }

    @property
    def ahead(self) -> int:
        """How far the position is ahead of the step at which it was told: steps of the loop that were none here."""
        return self._position - self._moved_at

    def load_state_dict(self, state: dict[str, Any], *, forecast: bool = True) -> None:
        """Restore `state_dict`; without its forecast where the one that there is holds."""
        self.told = {int(step): list(values) for step, values in state["told"].items()}
        self._last = max(self.told)
        if forecast:
            self._foresee(state["forecast"].tolist())
        self.warm_up(int(state.get("warmup_steps", 0)))
        self._position, self._moved_at = int(state["position"]), int(state["moved_at"])


class Told(Schedule):
    """One parameter group's part of a course.

    Args:
        warmed: held below a line for as many steps as the course says, where it comes near its peak too early.
    """

    kind = "told"
    _course: Course = PrivateAttr()
    _group: int = PrivateAttr()
    _total_steps: int | None = PrivateAttr()
    _warmed: bool = PrivateAttr()

    def __init__(self, course: Course, group: int, total_steps: int | None, warmed: bool = False) -> None:
        super().__init__()
        self._course, self._group, self._total_steps, self._warmed = course, group, total_steps, warmed

    @cached_property  # of pydantic's own attributes each takes microseconds to look up, and every step asks
    def course(self) -> Course:
        """What is told of all groups."""
        return self._course

    @cached_property
    def group(self) -> int:
        """The index of the group whose values these are."""
        return self._group

    @cached_property
    def warmed(self) -> bool:
        """Whether it is held below a line for as many steps as the course says."""
        return self._warmed

    @property
    def total_steps(self) -> int | None:
        """How far the course is foreseen; None where it is not."""
        return self._total_steps

    def nominal_peak(self) -> float:
        """The most that the scheduler will have written, as far as it is foreseen."""
        return self.course.peaks[self.group] if self.course.forecast else super().nominal_peak()

    def steps_before(self) -> int:
        """Those of the scheduler, where it is known; none where it is held below a line, which warms up anew."""
        return self.course.steps_before if self._line is None else 0

    def with_warmup(self, steps: int) -> Told:
        """The course takes note of it, whose state goes into a checkpoint: all of its groups that ask have the same."""
        self.course.warm_up(steps)
        return Told(self.course, self.group, self._total_steps, warmed=True)

    def __call__(self, t: int) -> float:
        """The value at step t."""
        value = self.course.at(t)[self.group]
        line = self._line if t < self.course.warmup_steps else None
        return value if line is None else min(value, line * (t + 1))

    @property
    def _line(self) -> float | None:
        """How far the line that holds it rises in a step; None where nothing does."""
        return self.course.lines[self.group] if self.warmed and self.course.warmup_steps else None


class Follower:
    """A torch scheduler, asked where it stands, and simulated on a copy to know where it goes.

    Args:
        scheduler: steps `optimizer`.
        steps_between: optimizer steps between two of its steps.

    Raises:
        ConfigError: it is no torch scheduler, belongs to another optimizer, or waits for a metric.
    """

    def __init__(self, scheduler: Any, optimizer: Optimizer, steps_between: int = 1) -> None:
        self.scheduler = bare(scheduler)
        if isinstance(self.scheduler, ReduceLROnPlateau):
            raise ConfigError(
                "ReduceLROnPlateau waits for a metric, so nobody knows where it goes; give hdet.attach schedule=None, "
                "which follows what it writes and never looks ahead"
            )
        if not isinstance(self.scheduler, LRScheduler):
            raise ConfigError(
                f"scheduler= takes a torch.optim.lr_scheduler.LRScheduler, a scheduler of timm's, or a function of the "
                f"step that tells what the loop writes, got {_shown(scheduler)}; give schedule=None to follow what "
                f"something else writes, or schedule=hdet.schedules.Cosine(...) for one of hdet's"
            )
        # A trainer may have given its scheduler the optimizer that it wraps torch's in.
        self._stepped = getattr(self.scheduler, "optimizer", optimizer)
        require_own(self.scheduler, optimizer)
        self.steps_between = steps_between
        self.optimizer = optimizer
        self.steps_each = _steps_each(scheduler)
        self._hands_over = False  # to another scheduler that it holds, which alone counts from then on
        self.first = self._count()
        """Where the scheduler stood when it was simulated."""

    kept = True
    """A search that goes on has the forecast of its checkpoint."""
    known_in_passes = True
    """The optimizer holds a step's rates in its passes already."""

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return type(self.scheduler).__name__

    @property
    def under_way(self) -> bool:
        """Whether it has made steps before it was simulated."""
        return self.first > 0

    @property
    def steps_before(self) -> int:
        """The optimizer steps that brought it there, at the most: it may have been about to step again."""
        return (self.first // self.steps_each + 1) * self.steps_between - 1

    @property
    def position(self) -> int:
        """How many steps the scheduler has made since it was simulated."""
        return self._count() - self.first

    def resume(self, simulated_at: int, ahead: int) -> None:
        """Go on from a checkpoint, whose forecast was made there."""
        self.first = simulated_at

    def position_at(self, step: int) -> int:
        """Where it stands in the forecast, whatever the step."""
        return self.position

    def place(self, step: int, held: Row, rows: Sequence[Row]) -> int | None:
        """Where it stands in the forecast; None where the optimizer does not hold what it would have put there.

        Raises:
            StepError: it is stepped by fractions of an epoch.
        """
        position = self.position
        if held == rows[min(max(position, 0), len(rows) - 1)]:
            return position
        if getattr(self.scheduler, "T_cur", 0) % 1:
            raise StepError(
                f"{self.name} is stepped by fractions of an epoch (it stands at {self.scheduler.last_epoch} and "
                f"T_cur={self.scheduler.T_cur:g}), whose pace hdet cannot foresee; step it once an optimizer step, its "
                f"T_0 in optimizer steps, or give hdet.attach schedule=None, which follows what it writes and never "
                f"looks ahead"
            )
        return None

    def complaint(self, step: int, held: Row, expected: Row) -> str:
        """What is said where the optimizer holds something else."""
        return (
            f"the learning rates at step {step} are {held}, where {self.name} would have put {expected}: something "
            f"else writes them too, or it goes by more than its own count of steps; give hdet.attach schedule=None, "
            f"which follows whatever comes and never looks ahead, or as scheduler= a function of the step"
        )

    def forecast(
        self, total_steps: int, groups: Sequence[Mapping[str, Any]], read: Callable[[Optimizer], list[float]]
    ) -> list[list[float]]:
        """What `read` gives after 0, 1, 2, ... steps of the scheduler, until `total_steps` optimizer steps are over.

        Args:
            groups: of the optimizer, as the scheduler knows them.

        Raises:
            ConfigError: it cannot be copied, its step raises, or a function that it asks keeps a count of its own.
        """
        shadow = shadow_of(self.optimizer, groups)
        functions = _functions(self.scheduler)
        first = _answers(functions, self._count())
        # What only a function of the step needs is not copied: the owner of a method may be a whole trainer.
        memo: dict[int, Any] = {id(function): function for function in functions}
        scheduler = copied(self.scheduler, {**memo, id(self.optimizer): shadow, id(self._stepped): shadow})
        rows, counts = [read(shadow)], [_counts(scheduler)]
        for _ in range(-(-total_steps // self.steps_between) * self.steps_each):
            try:
                scheduler.step()
            except ValueError:  # OneCycleLR refuses to go beyond its end
                break
            except Exception as error:
                raise ConfigError(
                    f"{self.name} cannot be simulated ahead: its step() raised {type(error).__name__} ({error}); where "
                    f"it waits for a metric nobody knows where it goes. Give hdet.attach schedule=None, which follows "
                    f"what it writes and never looks ahead"
                ) from error
            row = read(shadow)
            if self.first and min(row) < 0.0:  # on a resume it is simulated beyond the end of the run
                break
            rows.append(row)
            counts.append(_counts(scheduler))
        own, of_all = (np.diff(column) for column in zip(*counts, strict=True))
        self._hands_over = bool((own != 1).any() and (of_all == 1).all())
        self.first = self._count()
        self._refuse_counting(functions, first)
        return rows

    def _refuse_counting(self, functions: Sequence[Function], first: Sequence[float]) -> None:
        """A function that gives another answer after the simulation than before it has a state, which is used up."""
        step = self._count()
        for function, then, now in zip(functions, first, _answers(functions, step), strict=True):
            if then != now:
                raise ConfigError(
                    f"{_name(function)}, which {type(self.scheduler).__name__} asks for the rate, gave {then:g} for "
                    f"step {step} and {now:g} when it was asked again, so it keeps a count of its own, which "
                    f"simulating it has moved on: make it a function of the step alone, or an object with __call__ "
                    f"that holds the count, which is copied; or make the scheduler anew and give hdet.attach "
                    f"schedule=None, which never looks ahead"
                )

    def _count(self) -> int:
        return _counts(self.scheduler)[1] if self._hands_over else int(_counting(self.scheduler).last_epoch)


def _counting(scheduler: Any) -> Any:
    """Of a chain the one that counts for it."""
    while isinstance(scheduler, ChainedScheduler):
        scheduler = scheduler._schedulers[-1]
    return scheduler


def _counts(scheduler: Any) -> tuple[int, int]:
    """How many steps a scheduler says that it has made; then with those of the schedulers that it holds."""
    scheduler = _counting(scheduler)
    own = int(scheduler.last_epoch)
    held = () if isinstance(scheduler, SequentialLR) else _parts(scheduler)  # it counts all steps itself
    return own, own + sum(_counts(part)[1] for part in held)


def _parts(scheduler: Any) -> list[LRScheduler]:
    """The schedulers that one holds, by themselves or in lists."""
    held = [own if isinstance(own, (list, tuple)) else [own] for own in vars(scheduler).values()]
    return [part for own in held for part in own if isinstance(part, LRScheduler)]


def _functions(scheduler: Any) -> list[Function]:
    """The plain functions and methods that a scheduler, or a part of it, asks for its values."""
    asked = list(getattr(scheduler, "lr_lambdas", ()))
    for part in _parts(scheduler):
        asked += _functions(part)
    return [function for function in asked if isinstance(function, (FunctionType, MethodType, partial))]


def _answers(functions: Sequence[Function], step: int) -> list[float]:
    return [float(function(step)) for function in functions]


def _name(function: Function) -> str:
    return str(getattr(function, "__qualname__", function))


def _shown(scheduler: Any) -> str:
    return f"the class {scheduler.__name__}" if isinstance(scheduler, type) else type(scheduler).__name__


def _steps_each(scheduler: Any) -> int:
    """Accelerate's wrapper makes as many steps at a time as there are processes, unless they split each batch."""
    wrapped = hasattr(scheduler, "split_batches") and hasattr(scheduler, "step_with_optimizer")
    if not wrapped or scheduler.split_batches or not scheduler.step_with_optimizer:
        return 1
    return world()


def bare(scheduler: Any) -> Any:
    """The torch scheduler inside a trainer's wrapper."""
    while not isinstance(scheduler, (LRScheduler, ReduceLROnPlateau)) and hasattr(scheduler, "scheduler"):
        scheduler = scheduler.scheduler
    return scheduler


def writes_into(scheduler: Any, optimizer: Any) -> bool:
    """Whether a scheduler steps an optimizer, through whatever wraps it, or the one that it stands for (`inner`)."""
    held = getattr(bare(scheduler), "optimizer", optimizer)
    while held is not None:
        if held is optimizer or held is getattr(optimizer, "inner", optimizer):
            return True
        held = getattr(held, "optimizer", None)
    return False


def copied(scheduler: Any, memo: dict[int, Any]) -> Any:
    """A scheduler's copy, with others in place of what `memo` has the ids of."""
    try:
        return copy.deepcopy(scheduler, memo)
    except Exception as error:
        raise ConfigError(
            f"{type(scheduler).__name__} cannot be copied, and so not be simulated ahead ({error}); give hdet.attach "
            f"schedule=None, which follows what it writes and never looks ahead"
        ) from error


def require_own(scheduler: Any, optimizer: Any) -> None:
    """Refuse a scheduler that steps another optimizer."""
    if not writes_into(scheduler, optimizer):
        raise ConfigError(
            "the scheduler belongs to another optimizer; give hdet.attach the optimizer that it steps, or make the "
            "scheduler of the optimizer given, which has all groups if it is a chain"
        )


def bare_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside a trainer's wrapper."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def rates(optimizer: Optimizer) -> list[float]:
    """The learning rate of each parameter group."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def shadow_of(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> Optimizer:
    """An optimizer of no parameters with the defaults of one, whose groups hold what the given ones hold."""
    shadow = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    shadow.defaults = copy.deepcopy(optimizer.defaults)
    shadow.param_groups = [
        {key: [] if key == "params" else _plain(value) for key, value in group.items()} for group in groups
    ]

    def step() -> None:
        """Never called. Torch looks at it to warn of a scheduler that steps before its optimizer."""

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    shadow.step = step  # type: ignore[assignment, method-assign]
    shadow._opt_called = True  # type: ignore[attr-defined]
    return shadow


def _plain(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
