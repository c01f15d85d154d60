"""What the user or a scheduler holds in the optimizer: read before each step, and refused where it cannot be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hdet.errors import CheckpointError, ConfigError, StepError
from hdet.overlay.foretold import Foretold
from hdet.overlay.split_groups import SplitGroups
from hdet.overlay.told_schedule import Course, Follower, Row
from hdet.user_warning import warn

Entry = tuple[str, int | None]
RATE: Entry = ("lr", None)
UNMOVED = 10
"""Steps that a scheduler was to have made, after which it is said that it has made far fewer."""


class Rates:
    """The entries of the optimizer's groups that knobs are relative to, and the rate where hdet's schedule drives it.

    Args:
        follower: the scheduler, or the function of the step, where it is known.
        forecast: the rates that it foretells, of each of the user's groups.
        driven: hdet's own schedule drives the learning rate, which the user is to leave as it is.
        split: cuts the groups for a step; what the user holds in them goes by whole groups.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        follower: Follower | Foretold | None,
        driven: bool,
        split: SplitGroups | None = None,
        forecast: Sequence[Row] = (),
    ) -> None:
        self.optimizer = optimizer
        self.split = split
        self.follower = follower
        self.driven = driven
        self.courses: dict[Entry, Course] = {}
        self._forecast = forecast
        self._first = self.read(RATE)
        self._was_fresh = not optimizer.state
        self._opened = False  # a window, since the last step was told
        self._made = 0  # steps of the scheduler by the time when it was to have made `UNMOVED`

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups as the user knows them."""
        return self.optimizer.param_groups if self.split is None else self.split.wholes

    def owner(self, index: int) -> int:
        """The place among them of a group that a knob goes by."""
        return index if self.split is None else self.split.owners[index]

    def course(self, entry: Entry) -> Course:
        """What all groups hold under an entry; the learning rate's is foreseen where the scheduler is known."""
        if entry not in self.courses:
            known = self.follower if entry == RATE and self._forecast else None
            forecast = self._forecast if known is not None else ()
            pace = (known.steps_between, known.steps_each, known.steps_before) if known is not None else (1, 1, 0)
            first = forecast[0] if forecast else self.read(entry)
            self.courses[entry] = Course(first, forecast, *pace, warms_up=entry == RATE)
        return self.courses[entry]

    def read(self, entry: Entry) -> list[float]:
        """What the groups hold; 0 where one has no such entry, the last known where it lies on a device."""
        return [self._value(index, entry) for index in range(len(self.groups))]

    def tell(self, step: int, *, over: bool = False, settled: bool = True) -> bool:
        """The coming step is made with what the optimizer holds now. Returns whether that is not what was foreseen.

        Before it is `settled`, in the step's passes, a loop may not have written the rates yet that it foretells.

        Where the run is over nothing is foreseen any more, and the scheduler goes where it will.

        Raises:
            StepError: a rate that nobody was to move has moved, or not as the scheduler would have moved it; or the
                optimizer holds other groups.
        """
        groups = len(self.groups)
        if groups != len(self._first):
            raise StepError(
                f"the optimizer holds {groups} parameter groups at step {step}, and held {len(self._first)} when hdet "
                f"was attached; knobs go by the number of a group. Call hdet.attach after the last add_param_group, or "
                f"give the optimizer all parameters from the start and train some of them later: "
                f"parameter.requires_grad_(False)"
            )
        if self.split is not None:
            self.split.refuse_other_parameters(step)
        if step == 0 and self._loaded_since():
            assert self.follower is not None
            raise StepError(
                f"{self.follower.name} has made {self.follower.position} steps since hdet.attach, and the search none: "
                f"its state, of a run under way, was loaded in between, and the search's was not; load it before "
                f"hdet.attach, so that the search begins there, or load the search's state too"
            )
        if self.driven and (self._opened or not self._on_device):
            self._refuse_moved()
        self._opened = False
        surprised = False
        for entry, course in self.courses.items():
            foreseen = course.at(step)
            if entry == RATE and self.follower is not None and course.forecast and not over:
                if step not in course.told:
                    self._notice_standing(self.follower, course, step)
                course.tell(step, *self._followed(self.follower, course, step, settled))
            else:
                course.tell(step, self.read(entry))
            surprised = surprised or course.at(step) != foreseen
        return surprised

    @property
    def _on_device(self) -> bool:
        """Whether a learning rate is a tensor that a device would be waited for to read."""
        return any(isinstance(group["lr"], Tensor) and group["lr"].device.type != "cpu" for group in self.groups)

    def _loaded_since(self) -> bool:
        """Whether a run under way was loaded after the search was made: its moments, and its scheduler's steps.

        A scheduler alone may be ahead, as where a GradScaler leaves out the first steps.
        """
        ahead = self.follower is not None and self.follower.position > self.follower.steps_each
        return ahead and self._was_fresh and bool(self.optimizer.state)

    def forget_before(self, step: int) -> None:
        """A window has opened at a step. The device was waited for, and rates that lie there can be read."""
        self._opened = True
        for course in self.courses.values():
            course.forget_before(step - 2)  # the two before it tell what the step was expected to be

    def state_dict(self) -> dict[str, Any]:
        return {
            "courses": {_named(entry): course.state_dict() for entry, course in self.courses.items()},
            "simulated_at": self.follower.first if self.follower is not None else 0,
            "found": list(self._first),
            "split": self.split.state_dict() if self.split is not None else None,
        }

    def require_courses(self, state: Mapping[str, Any]) -> None:
        """Whether a state tells of the entries that knobs here are relative to.

        Raises:
            CheckpointError: it does not.
        """
        own, told = {_named(entry) for entry in self.courses}, set(state["courses"])
        if own != told:
            raise CheckpointError(
                f"the state is of a search that moves {sorted(told)} of the optimizer's groups, and this one moves "
                f"{sorted(own)}; explore the same to resume"
            )
        if self.split is not None:
            self.split.require(state.get("split"))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        kept = self.follower is None or self.follower.kept
        for entry, course in self.courses.items():
            course.load_state_dict(state["courses"][_named(entry)], forecast=kept or entry != RATE)
        self._first = list(state["found"])
        if self.split is not None and state.get("split") is not None:
            self.split.load_state_dict(state["split"])
        if self.follower is not None:
            ahead = self.courses[RATE].ahead if RATE in self.courses else 0
            self.follower.resume(int(state["simulated_at"]), ahead)
            for course in self.courses.values():
                course.steps_before = self.follower.steps_before

    def _followed(
        self, follower: Follower | Foretold, course: Course, step: int, settled: bool
    ) -> tuple[list[float], int]:
        """What the optimizer holds, and where in the forecast that is."""
        foreseen = follower.position_at(step)
        if self._on_device or not (settled or follower.known_in_passes):
            return course.foreseen(foreseen), foreseen
        held = self.read(RATE)
        position = follower.place(step, held, course.forecast)
        if position is not None:
            return held, position
        if min(held) < 0.0:
            raise StepError(
                f"{follower.name} has gone below 0 at step {step}: the learning rates are {held}; let it end at 0, as "
                f"by max(0.0, ...)"
            )
        raise StepError(follower.complaint(step, held, course.foreseen(foreseen)))

    def _notice_standing(self, follower: Follower | Foretold, course: Course, step: int) -> None:
        """Say it once where the scheduler stands still, or makes three quarters of its steps at most.

        One that is slow is told of after as many steps again: it may only have begun late. Rates that a function tells
        are compared by themselves.
        """
        if isinstance(follower, Foretold) or course.foreseen(0) == course.foreseen(UNMOVED):
            return
        made, foreseen = follower.position_at(step), step // follower.steps_between * follower.steps_each
        slow = 0.75 * UNMOVED * follower.steps_each
        if step == UNMOVED * follower.steps_between:
            self._made, told = made, made == 0
        else:
            due = step == 2 * UNMOVED * follower.steps_between
            told = due and 0 < self._made <= slow and made - self._made <= slow
        if told:
            warn(
                f"{follower.name} has made {made} steps in {step} optimizer steps, and hdet looks ahead as if it had "
                f"made {foreseen}: where the loop steps it more rarely, as once an epoch, give hdet.attach "
                f"scheduler_every=, the optimizer steps from one of its steps to the next"
            )

    def _refuse_moved(self) -> None:
        held = self.read(RATE)
        if held != self._first:
            raise StepError(
                f"the optimizer's learning rates were {self._first} when hdet was attached and are {held} now, and "
                f"hdet was told of no scheduler and brings a schedule of its own; give hdet.attach scheduler=, your "
                f"torch scheduler or the function of the step that your loop writes by, or schedule=None to follow "
                f"what comes (as of ReduceLROnPlateau, which nobody can foretell), or leave the rates as they are"
            )

    def _value(self, index: int, entry: Entry) -> float:
        key, item = entry
        group = self.groups[index]
        if key not in group:
            return 0.0
        held = group[key] if item is None else group[key][item]
        if held is None:
            raise ConfigError(
                f"parameter group {index} has {key}=None, so the optimizer works its own value out, which hdet cannot "
                f"move; give it a number, as by Adafactor(lr=1e-3, relative_step=False), or attach to another optimizer"
            )
        if isinstance(held, Tensor) and held.device.type != "cpu" and entry in self.courses:
            return self.courses[entry].latest[index]  # reading would wait for the device
        return float(held)


def _named(entry: Entry) -> str:
    key, item = entry
    return key if item is None else f"{key}[{item}]"
