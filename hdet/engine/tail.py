"""The tail: a run ends with averaged weights where a held-out loss proves them better than the last ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from hdet.evidence import Harvest, Scene
from hdet.evidence.parts.line_fit import along
from hdet.replicas import tensors
from hdet.replicas.average import towards_
from hdet.spec import Spec, register


class Tail(Spec, family="tail"):
    """Decides at the run's end which weights it ends with."""

    def follow(self, scene: Scene) -> FollowedTail:
        """The tail at work on one engine's replicas."""
        raise NotImplementedError


@register
class TailAverage(Tail):
    """End with the weights averaged over the tail of the run, if they are proved to be better than the last ones.

    The mean of the weights over the steps from s to the end is worked out for a few s. At the end the probe compares
    each with the last weights, on the same batches. With d the difference of the held-out losses (below 0 where the
    mean is better) and e its standard error over sub-batches, the mean with the lowest d + significance e is taken, if
    that is below 0; else the weights stay as they are. Training itself does not change.

    Averages smooth what the last steps did by chance. Where data repeat they also overfit less. Where data are always
    new the last weights of a rate that falls to 0 are as good or better, and stay. (Suffix averages: Rakhlin, Shamir
    and Sridharan 2012, arXiv 1109.5647; over the end of a network's training: Izmailov et al. 2018, arXiv 1803.05407.)

    Running statistics (buffers whose names begin with `running_`, as BatchNorm's) are averaged over the windows' ends;
    other buffers and the optimizer's state are left as they are. A run whose length is not known beforehand has no
    tail, and neither has one under a Schedule-Free optimizer, whose weights are an average already. Where the run goes
    back to an earlier point, the tail begins anew.

    Args:
        starts: where means begin, as shares of the run, rising. Each begins with the first window that opens there.
        significance: standard errors by which a mean has to be better.
        draws: where a probe's batches are a function of the window's number, of how many windows: the last one and
            those before. (Batches in a list are always the same.)
        keep: where the means are kept: a copy of the trained weights, in float32 at least, for each start.

    >>> TailAverage(starts=(0.5,)).starts
    (0.5,)
    """

    starts: tuple[float, ...] = Field(default=(0.4, 0.7), min_length=1)
    significance: float = Field(default=1.0, ge=0, le=100)
    draws: int = Field(default=4, ge=1)
    keep: Literal["host", "device"] = "host"

    @field_validator("starts")
    @classmethod
    def _rising(cls, starts: tuple[float, ...]) -> tuple[float, ...]:
        if not all(0 <= start < 1 for start in starts) or sorted(set(starts)) != list(starts):
            raise ValueError(
                f"shares of the run from 0 to below 1, each above the one before, are expected; got {starts}"
            )
        return starts

    def follow(self, scene: Scene) -> FollowedTail:
        return FollowedTail(self, scene)


class TailMean:
    """The mean of weights and buffers over some windows on end.

    Attributes:
        start: the first step. steps: how many. weights: in the model's order. buffers: running statistics, by name.
    """

    def __init__(self, start: int, device: torch.device | str | None) -> None:
        self.start, self.steps = start, 0
        self.weights: list[Tensor] = []
        self.buffers: dict[str, Tensor] = {}
        self._device = device

    @torch.no_grad()
    def take(self, weights: Sequence[Tensor], buffers: Mapping[str, Tensor], steps: int) -> None:
        """Take in the means of so many steps more."""
        if not self.steps:
            self.weights = [self._memory(value) for value in weights]
            self.buffers = {name: self._memory(value) for name, value in buffers.items()}
        self.steps += steps
        pairs = zip([*self.weights, *self.buffers.values()], [*weights, *buffers.values()], strict=True)
        for mean, value in pairs:
            towards_(mean, value, steps / self.steps)

    def fits(self, weights: Sequence[Tensor], buffers: Mapping[str, Tensor]) -> bool:
        """Whether these are the same weights and buffers, by their shapes."""
        return _layout(self.weights, self.buffers) == _layout(weights, buffers)

    def _memory(self, value: Tensor) -> Tensor:
        return torch.empty_like(value, dtype=tensors.wide_type(value.dtype), device=self._device)

    def state_dict(self) -> dict[str, Any]:
        names, values = list(self.buffers), tensors.clones(list(self.buffers.values()))
        return {
            "start": self.start,
            "steps": self.steps,
            "values": tensors.clones(self.weights),
            "buffers": dict(zip(names, values, strict=True)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.start, self.steps = state["start"], 0
        self.take(state["values"], state["buffers"], state["steps"])


class FollowedTail:
    """Keeps a mean from each start on, in parts: of the windows between two starts, and of those after the last."""

    def __init__(self, spec: TailAverage, scene: Scene) -> None:
        self.spec = spec
        self.scene = scene
        self.parts: list[TailMean] = []
        if not scene.averages.strides:
            scene.follow(None)

    def forget(self) -> None:
        """The run goes on from another point."""
        self.parts = []

    def add(self, harvest: Harvest) -> None:
        """A window has closed."""
        window = harvest.window
        if window.total_steps is None:
            return
        begun = [start for start in self.spec.starts if window.start >= start * window.total_steps]
        if not begun:
            return
        weights = self.scene.averaged(harvest.valid, self.scene.averages.strides[0])
        buffers = running_statistics(self.scene.replicas.hosts[0][0])
        if self.parts and not self.parts[-1].fits(weights, buffers):
            self.forget()  # other parameters are trained from here on
        first = begun[-1] * window.total_steps
        if not self.parts or self.parts[-1].start < first:
            self.parts.append(TailMean(window.start, self._device))
        self.parts[-1].take(weights, buffers, window.stop - window.start)

    def best(self, harvest: Harvest) -> tuple[TailMean | None, dict[str, float]]:
        """The run is over: the mean that is proved to be best, if one is.

        Returns:
            It, and numbers to record: its first step (`start`), the `difference` of its held-out loss to that of the
            last weights, and the `stderr` of that. `None` and nothing where the last weights are to stay.
        """
        means, self.parts = list(reversed(self.parts)), []
        for newer, older in pairwise(means):
            older.take(newer.weights, newer.buffers, newer.steps)  # so each is a mean up to the end
        chosen, told, least = None, {}, 0.0
        for mean, losses in zip(means, self._losses(harvest, means), strict=True):
            better = along((0.0, 1.0), losses)
            bound = better.slope + self.spec.significance * better.stderr
            if bound < least:
                least, chosen = bound, mean
                told = {"start": mean.start, "difference": better.slope, "stderr": better.stderr}
        return chosen, told

    def put(self, mean: TailMean) -> None:
        """Let every model hold a mean."""
        for host in range(len(self.scene.replicas.hosts)):
            live, values = self._places(host, mean)
            tensors.copy_(live, values)

    def _losses(self, harvest: Harvest, means: Sequence[TailMean]) -> list[np.ndarray[Any, np.dtype[np.float64]]]:
        """By mean, [2, J] probe losses of the last weights and of it, the same in every process."""
        if not means:
            return []
        scene, probe, index = self.scene, self.scene.probe, harvest.window.index
        model, optimizer = scene.replicas.hosts[0]
        windows = range(max(0, index - self.spec.draws + 1), index + 1) if callable(probe.batches) else [index]
        drawn = [(window, probe.draw(window)) for window in windows]

        def measured() -> Tensor:
            return torch.cat([probe.measure(model, window, optimizer, batches) for window, batches in drawn])

        with scene.at_base():
            found = [measured()]
            for mean in means:
                live, values = self._places(0, mean)
                with tensors.substituted(live, values):
                    found.append(measured())
        # Every process uses the losses of the first process: others may differ in the last bits.
        rows = scene.replicas.gather(torch.cat(found).expand(len(scene.replicas.local), -1))
        last, *others = rows[0].reshape(len(found), -1)
        return [np.stack([last, losses]) for losses in others]

    def _places(self, host: int, mean: TailMean) -> tuple[list[Tensor], list[Tensor]]:
        """A model's weights and running statistics, and what a mean has for each."""
        model = self.scene.replicas.hosts[host][0]
        tensors.reshard(model)
        live = running_statistics(model)
        weights = self.scene.moving.values(host)
        return [*weights, *(live[name] for name in mean.buffers)], [*mean.weights, *mean.buffers.values()]

    @property
    def _device(self) -> str | None:
        return "cpu" if self.spec.keep == "host" else None

    def state_dict(self) -> list[dict[str, Any]]:
        """The means so far, by window's parts."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore `state_dict`; a checkpoint that has none begins the tail anew."""
        self.parts = []
        for saved in state:
            self.parts.append(TailMean(saved["start"], self._device))
            self.parts[-1].load_state_dict(saved)


def running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """By name this rank's part of each buffer that follows the batches, as BatchNorm's `running_mean` does."""
    named = ((name, tensors.local(buffer.detach())) for name, buffer in model.named_buffers())
    return {
        name: buffer
        for name, buffer in named
        if buffer.is_floating_point() and name.rpartition(".")[2].startswith("running_")
    }


def _layout(weights: Sequence[Tensor], buffers: Mapping[str, Tensor]) -> tuple[list[torch.Size], dict[str, torch.Size]]:
    return [value.shape for value in weights], {name: value.shape for name, value in buffers.items()}
