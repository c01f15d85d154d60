"""The engine at work underneath a torch learning rate scheduler, which goes on writing the base rates."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed
from pydantic import PrivateAttr
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.controllers import Paper
from hdet.engine.engine import Engine
from hdet.engine.tally import Losses
from hdet.errors import CheckpointError, ConfigError
from hdet.history import WindowRecord
from hdet.hparams import LearningRate, Schedule
from hdet.overlay.sharing import Sharing, extremes
from hdet.replicas import Replicas, replicate

KEY = "hdet"
"""Under which key of a scheduler's state the exploration's lies."""


class Course(Schedule):
    """A schedule decided by somebody else as training goes: it knows the steps it was told, and no others."""

    kind = "course"
    _values: dict[int, float] = PrivateAttr(default_factory=dict)

    @property
    def total_steps(self) -> None:
        """None: its end is not known."""
        return None

    def __call__(self, t: int) -> float:
        """The value at step t; past the last step told, the last value."""
        if t in self._values:
            return self._values[t]
        last = max(self._values, default=-1)
        if t > last >= 0:
            return self._values[last]
        raise ConfigError(f"the scheduler's value at step {t} is not remembered (only {sorted(self._values)})")

    def tell(self, t: int, value: float) -> None:
        """The value at step t is this."""
        self._values[t] = value

    def forget_before(self, t: int) -> None:
        """Keep steps from t on."""
        self._values = {step: value for step, value in self._values.items() if step >= t}

    def to_plain(self) -> dict[str, list[Any]]:
        """Steps and their values."""
        return {"steps": list(self._values), "values": list(self._values.values())}

    def restore(self, plain: dict[str, list[Any]]) -> None:
        """What `to_plain` gave."""
        self._values = dict(zip(plain["steps"], plain["values"], strict=True))


class Exploration:
    """Lets an engine vary the rates that a scheduler writes, one knob for each parameter group.

    Before the scheduler steps it gets its own values back, so that rules which read the rate they wrote last
    (most of torch's do) never see a replica's. What it writes then is the base of the coming step.

    Args:
        optimizer: the scheduler's.
        replicas: where they live; the first this process hosts must hold `optimizer`.
        knobs: the knob of each parameter group; `schedule` and `groups` are filled in here.
        scheduler_state: the scheduler's own `state_dict`.
        options: of `hdet.Engine`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        replicas: Replicas,
        knobs: Sequence[LearningRate],
        scheduler_state: Callable[[], dict[str, Any]],
        **options: Any,
    ) -> None:
        if replicas.hosts[0][1] is not optimizer:
            raise ConfigError(
                "the scheduler's optimizer must be the first replica's; make both from the same optimizer"
            )
        self.optimizer = optimizer
        self.replicas = replicas
        self._scheduler_state = scheduler_state
        self._own = self._read()
        self.courses = [Course() for _ in knobs]
        for course, group in zip(self.courses, optimizer.param_groups, strict=True):
            # A warm-up may start at 0, from which nothing can be read; the engine is shown the peak first.
            course.tell(0, peak(group))
        self.engine = Engine(
            replicas,
            [
                knob.replace(schedule=course, groups=index)
                for index, (knob, course) in enumerate(zip(knobs, self.courses, strict=True))
            ],
            **options,
        )
        self._follow(0)
        self.engine.reapply()
        self._opening = self._point()
        alike = replicas.diverge and replicas.size > 1 and self.engine.plan.gradients == "shared"
        self._sharing = Sharing(replicas) if alike else None

    def advance(self, step_scheduler: Callable[[], None], losses: Losses | None) -> WindowRecord | None:
        """After the optimizer's step: step the scheduler, take its rates as bases, let the engine go on.

        Raises:
            StepError: gradients were to be shared and were not; the run is over, or a loss is no scalar.
        """
        if self._sharing is not None and self._sharing.open:
            self._sharing.check(self.engine.step_count)
        if not self.replicas.shares_on_call:
            self.engine.gradients_are_shared()
        self._write(self._own)
        step_scheduler()
        self._own = self._read()
        self._follow(self.engine.step_count + 1)
        record = self.engine.step(losses)
        if record is not None:
            for course in self.courses:
                course.forget_before(self.engine.step_count - 1)
            self._opening = self._point()
        return record

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs besides the scheduler's own state: plain numbers and tensors."""
        return {
            "engine": self.engine.state_dict(),
            "step": self.engine.step_count,
            "own": [float(rate) for rate in self._own],
            "courses": [course.to_plain() for course in self.courses],
            "peaks": [knob.peak for knob in self.engine.knobs],
            "opening": copy.deepcopy(self._opening),
        }

    def load_state_dict(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """Restore, model and optimizer included.

        Returns:
            The scheduler's state to go back to, where the engine could only resume from the last converged
            point (another number of replicas, or another replica's state); else `None`.

        Raises:
            CheckpointError: the state is another exploration's, or of another moment than other processes'.
                Nothing has changed then.
        """
        together = self._agreed(state)
        before = [course.to_plain() for course in self.courses], [knob.peak for knob in self.engine.knobs]
        try:
            self._restore(state["courses"], state["peaks"])
            self.engine.load_state_dict(state["engine"] if together else {**state["engine"], "open": None})
        except Exception:
            self._restore(*before)
            raise
        self._opening = copy.deepcopy(state["opening"])
        back = self.engine.step_count != state["step"]
        self._own = list(self._opening["own"] if back else state["own"])
        return copy.deepcopy(self._opening["scheduler"]) if back else None

    def alike(self, own: Sequence[float | Tensor]) -> None:
        """Give all replicas of this process the first one's model and optimizer, and the scheduler's own rates."""
        self._write(own)
        (model, optimizer), *others = self.replicas.hosts
        for other_model, other_optimizer in others:
            other_model.load_state_dict(model.state_dict())
            other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def close(self) -> None:
        """Another takes this one's place."""
        if self._sharing is not None:
            self._sharing.close()

    def __getstate__(self) -> dict[str, Any]:
        if len(self.replicas.local) < self.replicas.size:
            raise TypeError(
                "a scheduler that explores over the ranks of a process group cannot be pickled or copied; save its "
                "state_dict()"
            )
        return self.__dict__

    def _agreed(self, state: dict[str, Any]) -> bool:
        """Whether all processes load one moment's state; if not, only the converged point they share will do.

        Raises:
            CheckpointError: they do not even share that.
        """
        if len(self.replicas.local) == self.replicas.size:
            return True
        point, window = state["engine"]["converged"], state["engine"]["window"]
        names = {name for name, _ in self.engine.hosts[0][0].named_parameters()}
        # At the start replicas may lie apart, each with the noise of its warm start.
        held = extremes(t for name, t in point["model"].items() if name in names) if window else [0.0, 0.0]
        row = torch.tensor([[state["step"], point["step"], window, *held]], dtype=torch.float64)
        table = self.replicas.gather(row.expand(len(self.replicas.local), -1))
        if (table[:, 1:] != table[0, 1:]).any():
            raise CheckpointError(
                f"the processes load states of different runs or moments: their last converged points are those of "
                f"the steps {table[:, 1].astype(int).tolist()} and must be one; load what was saved together"
            )
        return bool((table[:, 0] == table[0, 0]).all())

    def _restore(self, courses: list[dict[str, list[Any]]], peaks: list[float]) -> None:
        for course, plain in zip(self.courses, courses, strict=True):
            course.restore(plain)
        for knob, peak in zip(self.engine.knobs, peaks, strict=True):
            knob.peak = peak

    def _point(self) -> dict[str, Any]:
        return {
            "own": [float(rate) for rate in self._own],
            "scheduler": copy.deepcopy(self._scheduler_state()),
        }

    def _follow(self, step: int) -> None:
        """Tell the knobs the scheduler's rates at a step, and the other replicas what else it wrote."""
        for knob, course, rate in zip(self.engine.knobs, self.courses, self._own, strict=True):
            # The paper's controller takes the base over: what it moves is the rate at which it began.
            taken_over = isinstance(knob.spec.controller, Paper) and knob.state.started
            course.tell(step, course(step - 1) if taken_over else float(rate))
            knob.peak = max(knob.peak, float(rate))
        for _, other in self.engine.hosts[1:]:
            for group, source in zip(other.param_groups, self.optimizer.param_groups, strict=True):
                group.update({key: value for key, value in source.items() if key not in ("params", "lr")})

    def _read(self) -> list[float | Tensor]:
        return rates(self.optimizer)

    def _write(self, values: Sequence[float | Tensor]) -> None:
        write_rates(self.optimizer, values)
        for knob in self.engine.knobs:
            knob.forget()


def rates(optimizer: Optimizer) -> list[float | Tensor]:
    """The learning rate of each parameter group; tensors are copied."""
    return [group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"] for group in optimizer.param_groups]


def write_rates(optimizer: Optimizer, values: Sequence[float | Tensor]) -> None:
    """The learning rate of each parameter group; tensors are written in place."""
    for group, rate in zip(optimizer.param_groups, values, strict=True):
        if isinstance(group["lr"], Tensor):
            with torch.no_grad():
                group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def peak(group: dict[str, Any]) -> float:
    """The largest rate that a parameter group is known to reach."""
    return max(float(group[key]) for key in ("lr", "initial_lr", "max_lr") if key in group)


def how_many(model: nn.Module | None, replicas: Replicas | None) -> int:
    """How many replicas `surroundings` would find; it builds nothing, and takes any optimizer.

    Raises:
        ConfigError: both `model` and `replicas` were given.
    """
    if replicas is not None:
        if model is not None:
            raise ConfigError("give model= or replicas=, not both: replicas hold their models")
        return replicas.size
    many = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if many else 1


def surroundings(optimizer: Optimizer, model: nn.Module | None, replicas: Replicas | None) -> Replicas:
    """The replicas there are: those given, else those of `torch.distributed`, else this process alone.

    Raises:
        ConfigError: a parameter cannot be held by a module.
    """
    if replicas is not None:
        return replicas
    held = model if model is not None else OptimizedParameters(optimizer)
    if how_many(model, replicas) == 1:
        return replicate(held, optimizer, n=1)
    from hdet.replicas.distributed import distribute

    made: Replicas = distribute(held, optimizer)
    return made


class OptimizedParameters(nn.Module):
    """An optimizer's parameters in the shape of a module, where the model itself was not given.

    Buffers (BatchNorm's statistics) are not among them and so are not merged; give the model to have them.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        for index, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if not isinstance(parameter, nn.Parameter):
                    raise ConfigError(
                        f"parameter {position} of group {index} is a plain tensor; make it an "
                        f"nn.Parameter, or give the scheduler model= or replicas="
                    )
                self.register_parameter(f"group{index}_{position}", parameter)
