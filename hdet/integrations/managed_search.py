"""What replica groups tell each other that search alike, each by itself, under torchft; and what they cannot have."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from hdet.errors import ConfigError, StepError
from hdet.hparams.bend import Bend
from hdet.integrations.managed_state import Carried
from hdet.overlay.attach import attach
from hdet.overlay.riding import makes_state
from hdet.overlay.search import Search
from hdet.record import WindowRecord

OPTIONS = frozenset(inspect.signature(attach).parameters) - {"model", "optimizer", "probe"}
WITHOUT = {
    "guard": "whether a run goes back is decided by one group's own probe, and all must go back together",
    "tail": "which weights a run ends with is decided by one group's own probe, and all must end with the same",
    "noise_scale": "a pass's gradient is the groups' mean as it leaves backward",
    "replicas": "each group makes the search by itself",
}
"""Options of `hdet.attach` that groups cannot have, and why."""


class Agreed:
    """What groups that search alike tell each other, within torchft's own step.

    It is told before a step is committed, and used in the step. So all groups that make a step have the same.
    """

    search: Search

    def __init__(self, manager: Any, optimizer: Optimizer) -> None:
        self.manager = manager
        self.optimizer = optimizer
        self._learned: list[float] | None = None

    def ride(self, search: Search) -> None:
        """Go with a search until it is detached.

        Raises:
            ConfigError: the manager carries something else.
        """
        self.search = search
        carried = Carried.by(self.manager)
        carried.take(self)
        search.undo_when_detached(carried.leave)
        search.agree_on_losses(self.mean_loss)

    def mean_loss(self, loss: Tensor) -> Tensor:
        """The mean of the groups' losses, 0-dim; beside it in each pass of a window's first step what they learned.

        An average over groups that can be gone has to be made before a step is committed, so not as a window closes.
        """
        engine = self.search.engine
        opening = engine.step_count == engine.cycle.window.start
        learned = [number for knob in engine.knobs for number in knob.learned_numbers] if opening else []
        told = torch.cat([loss.reshape(1).double(), in_parts(learned).to(loss.device)])
        self.manager.allreduce(told).wait()
        self._learned = together(told[1:]) if opening else None
        return told[0].to(loss.dtype)

    def take_mean(self, *_: Any) -> None:
        """A step is committed: go by the mean of what the groups learned.

        Raises:
            StepError: it opens a window, and no loss was told with which the mean could come.
        """
        learned, self._learned = self._learned, None
        engine = self.search.engine
        if engine.finished or engine.step_count != engine.cycle.window.start:
            return
        if makes_state(self.optimizer, first=engine.step_count == 0):
            return
        if learned is None:
            raise StepError(
                f"no training loss was told in step {engine.step_count}, which opens a window: what replica groups "
                f"learned is averaged with the loss; write search.loss(loss).backward() in each pass, in all groups, "
                f"or return the loss from the model"
            )
        differing = False
        for place, knob in enumerate(engine.knobs):
            shift, power, log_factor = learned[3 * place : 3 * place + 3]
            if knob.learned_numbers != (shift, power, log_factor):
                knob.agree(shift, Bend(power, log_factor))
                differing = True
        if differing:
            engine.reapply()

    def state(self) -> dict[str, Any]:
        """What a group that comes back takes over."""
        windows = [record.to_json() for record in self.search.history.windows]
        return {"search": self.search.state_dict(), "windows": windows}

    def take_over(self, state: dict[str, Any]) -> None:
        """Go on where another group is, by its `state`."""
        if state["windows"]:
            self.search.history.take_over([WindowRecord.from_json(line) for line in state["windows"]])
        self.search.load_state_dict(state["search"])


def in_parts(numbers: Sequence[float]) -> Tensor:
    """[2n] float64: the first 24 bits of n numbers, and then their others.

    The mean of n equal numbers is not always that number: (x + x + x) / 3 may be off by the last bit. Sums of equal
    parts are exact, and so is their mean.
    """
    whole = torch.tensor(numbers, dtype=torch.float64)
    first = whole.float().double()
    return torch.cat([first, whole - first])


def together(parts: Tensor) -> list[float]:
    """The n numbers that were taken `in_parts`, or the means of such."""
    count = len(parts) // 2
    numbers: list[float] = (parts[:count] + parts[count:]).tolist()
    return numbers


def require_shareable(options: Mapping[str, Any]) -> None:
    """What groups that search alike cannot have.

    Raises:
        ConfigError: it was asked for.
    """
    if unknown := sorted(options.keys() - OPTIONS):
        raise ConfigError(f"no such option: {unknown}; there are {sorted(OPTIONS - WITHOUT.keys())}")
    for option, reason in WITHOUT.items():
        if options.get(option):
            raise ConfigError(f"{option}= cannot be had under torchft: {reason}; leave it out")
    for knob in options.get("knobs", ()):
        if knob.acts_on == "forward":
            raise ConfigError(
                f"{knob.label} is judged by the gradient of each pass, and under torchft that is the mean over replica "
                f"groups as it leaves backward; leave the knob out"
            )


def require_managed(manager: Any) -> None:
    """A manager, and a group, under which hdet can go on where another group is.

    Raises:
        ConfigError: its quorum is asynchronous, or the group is of several processes.
    """
    if manager._use_async_quorum:  # as torchft's own DiLoCo asks
        raise ConfigError(
            "a group that comes back takes over weights and bases before it trains; give torchft's Manager "
            "use_async_quorum=False"
        )
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"this replica group is of {dist.get_world_size()} processes, and a managed replica is one process; start "
            f"each as a group of its own"
        )
