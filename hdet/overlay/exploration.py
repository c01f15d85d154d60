"""The engine at work underneath a torch learning rate scheduler, which goes on writing the rates."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.controllers import Paper
from hdet.engine.engine import Engine
from hdet.engine.tally import Losses
from hdet.errors import CheckpointError, ConfigError, StepError
from hdet.hparams import LearningRate
from hdet.hparams.param_groups import parameters_of
from hdet.overlay.hooks import Hook, first_after_step
from hdet.overlay.lent_bindings import Lending, put_back
from hdet.overlay.told_schedule import Course, Told, rates
from hdet.replicas import Replicas, tensors
from hdet.replicas.distributed.fingerprint import fingerprint
from hdet.replicas.optimizer_numbers import kept_in_groups

KEY = "hdet"
"""Under which key of a scheduler's state the exploration's lies."""

EXACT = 2**48
"""Whole numbers below it keep their last digit in float64, up to the sum of 32 of them."""

LOOKS = 2
"""Steps that are looked at. In the first all replicas are alike, and on the same data their gradients would be too."""

_explorations: WeakKeyDictionary[Optimizer, ref[Exploration]] = WeakKeyDictionary()


class Exploration:
    """Lets an engine vary the rates that a scheduler writes, one knob for each parameter group.

    What the scheduler writes is the base. A replica's own rates are in force while its optimizer steps; the rest of
    the time the scheduler's are there, so that rules which read the rate they wrote last (most of torch's do) never see
    a replica's.

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
        # A warm-up may start at 0, from which nothing can be read; the engine is shown the peaks first.
        self._course = Course([peak(group) for group in optimizer.param_groups])
        self._lending = Lending()
        self.engine = Engine(
            replicas,
            [knob.replace(schedule=Told(self._course, index, None), groups=index) for index, knob in enumerate(knobs)],
            bind=self._lending.bind,
            **options,
        )
        self._follow(0)
        self.engine.reapply()
        self._opening = self._point()
        alike = replicas.diverge and replicas.size > 1 and self.engine.plan.gradients == "shared"
        self._sharing = Sharing(replicas) if alike else None
        self._put_on()

    def advance(self, step_scheduler: Callable[[], None], losses: Losses | None) -> None:
        """After the optimizer's step: step the scheduler, take its rates as bases, let the engine go on.

        Raises:
            StepError: gradients were to be shared and were not; the run is over, or a loss is no scalar.
        """
        if self._sharing is not None and not self._sharing.check(self.engine.step_count):
            self._sharing = None
        if not self.replicas.shares_on_call:
            self.engine.gradients_are_shared()
        step_scheduler()
        self._follow(self.engine.step_count + 1)
        with self._lending.all_in_force():
            closed = self.engine.step(losses) is not None
        if closed:
            self._course.forget_before(self.engine.step_count - 1)
            self._opening = self._point()

    def finish(self) -> None:
        """End the run: merges the window under way."""
        with self._lending.all_in_force():
            self.engine.finish()

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs besides the scheduler's own state: plain numbers and tensors."""
        return {
            "engine": self.engine.state_dict(),
            "step": self.engine.step_count,
            "rates": rates(self.optimizer),
            "course": self._course.state_dict(),
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
        if "course" not in state:
            raise CheckpointError(
                "the state is of another version of hdet, which held the scheduler's rates in another way; go on with "
                "that version, or load the scheduler's own state alone (without 'hdet'), which starts exploration anew"
            )
        before, held = self._course.state_dict(), rates(self.optimizer)
        written = held
        try:
            self._course.load_state_dict(state["course"])
            self.engine.load_state_dict(state["engine"])
            self._opening = copy.deepcopy(state["opening"])
            back = self.engine.step_count != state["step"]
            written = (self._opening if back else state)["rates"]
        except Exception:
            self._course.load_state_dict(before)
            raise
        finally:
            for _, optimizer in self.replicas.hosts:
                write_rates(optimizer, written)
        return copy.deepcopy(self._opening["scheduler"]) if back else None

    def alike(self, written: Sequence[float | Tensor]) -> None:
        """Give all replicas of this process the first one's model and optimizer, and the rates the scheduler wrote."""
        write_rates(self.optimizer, written)
        (model, optimizer), *others = self.replicas.hosts
        for other_model, other_optimizer in others:
            other_model.load_state_dict(model.state_dict())
            other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def close(self) -> None:
        """Another takes this one's place: nothing of it stays in force."""
        if self._sharing is not None:
            self._sharing.close()
        for hook in self._hooks:
            hook.remove()
        self._lending.take_out_update()

    def __getstate__(self) -> dict[str, Any]:
        if len(self.replicas.local) < self.replicas.size:
            raise TypeError(
                "a scheduler that explores over the ranks of a process group cannot be pickled or copied; save its "
                "state_dict()"
            )
        return {key: value for key, value in self.__dict__.items() if key != "_hooks"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._put_on()  # a copy of an optimizer has no hooks

    def _put_on(self) -> None:
        """From now on the rates of a replica are in force in its optimizer's steps."""
        earlier = _explorations.get(self.optimizer)
        if earlier is not None and (other := earlier()) is not None:
            other.close()  # a notebook's cell may run twice
        _explorations[self.optimizer] = ref(self)
        if self._sharing is not None:
            self._sharing.put_on()
        self._hooks = []
        for _, optimizer in self.replicas.hosts:
            self._hooks.append(optimizer.register_step_pre_hook(Hook(self._before_step)))
            self._hooks.append(first_after_step(optimizer, Hook(self._after_step)))

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._lending.take_out_update(optimizer)  # if the step before raised
        self._lending.put_in_update(optimizer)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._lending.take_out_update(optimizer)

    def _point(self) -> dict[str, Any]:
        return {"rates": rates(self.optimizer), "scheduler": copy.deepcopy(self._scheduler_state())}

    def _follow(self, step: int) -> None:
        """Tell the knobs the scheduler's rates at a step, and the other replicas all that it wrote.

        What an optimizer keeps as state in its groups, as Schedule-Free's `weight_sum`, is each replica's own.
        """
        written = rates(self.optimizer)
        before = self._course.at(step - 1) if step else written
        held = []
        for knob, own, last in zip(self.engine.knobs, written, before, strict=True):
            # The paper's controller takes the base over: what it moves is the rate at which it began.
            held.append(last if isinstance(knob.spec.controller, Paper) and knob.state.started else own)
            knob.peak = max(knob.peak, own)
        self._course.tell(step, held)
        kept = kept_in_groups(self.optimizer)
        for _, other in self.engine.hosts[1:]:
            for index, (group, source) in enumerate(zip(other.param_groups, self.optimizer.param_groups, strict=True)):
                others = {"params", "lr", *(key for place, key in kept if place == index)}
                group.update({key: value for key, value in source.items() if key not in others})
            write_rates(other, written)


def write_rates(optimizer: Optimizer, values: Sequence[float | Tensor]) -> None:
    """Each parameter group's learning rate; tensors are written in place."""
    for group, rate in zip(optimizer.param_groups, values, strict=True):
        put_back(group, "lr", torch.as_tensor(rate) if isinstance(group["lr"], Tensor) else float(rate))


def peak(group: dict[str, Any]) -> float:
    """The largest rate that a parameter group is known to reach."""
    return max(float(group[key]) for key in ("lr", "initial_lr", "max_lr") if key in group)


class Sharing:
    """Compares the replicas' gradients as their optimizers meet them, in the first steps of a run.

    A loop of the user's own may share them in many ways (DistributedDataParallel, `share_gradients`, an all-reduce),
    and not all can be seen from here. Their outcome can: the same gradient, bit for bit, at every replica.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._looks = LOOKS
        self._seen: dict[int, list[float]] = {}  # by the optimizer's host

    def put_on(self) -> None:
        """Look from the optimizers' next steps on."""
        self._hooks = [
            optimizer.register_step_pre_hook(partial(self._look, host))
            for host, (_, optimizer) in enumerate(self._replicas.hosts)
        ]

    def check(self, step: int) -> bool:
        """After the optimizers' steps, in every process. Returns whether the next are to be looked at too.

        Raises:
            StepError: the replicas' gradients differ.
        """
        rows = [[float(r.host in self._seen), *self._seen.get(r.host, (0.0, 0.0))] for r in self._replicas.local]
        table = self._replicas.gather(torch.tensor(rows, dtype=torch.float64))
        self._seen.clear()
        if not table[:, 0].all():
            return True  # an optimizer's step was left out, as by a GradScaler
        if (table != table[0]).any():
            raise StepError(
                f"the gradients of the {len(table)} replicas differ in step {step}, so each trains on its own (local "
                f"SGD), and gradients='shared' was declared: wrap the model in DistributedDataParallel, or call "
                f"scheduler.engine.share_gradients() after the last backward of a step; or declare gradients='local'"
            )
        self._looks -= 1
        if not self._looks:
            self.close()
        return self._looks > 0

    def close(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()

    def _look(self, host: int, optimizer: Optimizer, *_: Any) -> None:
        gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
        dense = [tensors.local(gradient) for gradient in gradients if gradient.layout == torch.strided]
        if gradients:
            self._seen[host] = fingerprint(dense, torch.device("cpu")).remainder(EXACT).tolist()
