"""What replica groups tell each other that search alike, each by itself, under torchft; and what they cannot have."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hdet.errors import ConfigError
from hdet.overlay.attach import attach
from hdet.overlay.search import Search
from hdet.record import WindowRecord

OPTIONS = frozenset(inspect.signature(attach).parameters) - {"model", "optimizer", "probe"}
WITHOUT = {
    "guard": "whether a run goes back is decided by one group's own probe, and all must go back together",
    "noise_scale": "a pass's gradient is the groups' mean as it leaves backward",
    "replicas": "each group makes the search by itself",
}
"""Options of `hdet.attach` that groups cannot have, and why."""


class Agreed:
    """What groups that search alike tell each other, within torchft's own step.

    It is told before a step is committed, and used in the step. So all groups that make a step have the same.
    """

    search: Search

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self._shifts: list[float] | None = None

    def ride(self, search: Search, before_step: RemovableHandle) -> None:
        """Go with a search until it is detached."""
        self.search = search
        search.agree_on_losses(self.mean_loss)
        search.undo_when_detached(before_step.remove)
        self.manager.register_state_dict_fn("hdet", self._take_over, self._state)

    def mean_loss(self, loss: Tensor) -> Tensor:
        """The mean of the groups' losses, 0-dim; beside it in the first pass of a window, the mean of all shifts."""
        engine = self.search.engine
        opening = engine.step_count == engine.cycle.window.start
        shifts = [knob.shift for knob in engine.knobs] if opening else []
        told = torch.cat([loss.reshape(1).double(), torch.tensor(shifts, dtype=torch.float64, device=loss.device)])
        self.manager.allreduce(told).wait()
        self._shifts = told[1:].tolist() if opening else None
        return told[0].to(loss.dtype)

    def take_mean(self, *_: Any) -> None:
        """A step is committed: go by the mean of what the groups learned."""
        shifts, self._shifts = self._shifts, None
        if shifts is None:
            return
        engine = self.search.engine
        if shifts != [knob.shift for knob in engine.knobs]:
            for knob, shift in zip(engine.knobs, shifts, strict=True):
                knob.shift = shift
            engine.reapply()

    def _state(self) -> dict[str, Any]:
        windows = [record.to_json() for record in self.search.history.windows]
        return {"search": self.search.state_dict(), "windows": windows}

    def _take_over(self, state: dict[str, Any]) -> None:
        if state["windows"]:
            self.search.history.take_over([WindowRecord.from_json(line) for line in state["windows"]])
        self.search.load_state_dict(state["search"])


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
