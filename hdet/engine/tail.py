"""The tail: a run ends with averaged weights where a held-out loss finds them better than the last ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, field_validator
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.controllers import Estimate
from hdet.evidence import Harvest, Scene
from hdet.evidence.parts.line_fit import along
from hdet.replicas import tensors
from hdet.replicas.average import towards_
from hdet.replicas.schedule_free import is_schedule_free
from hdet.spec import Spec, register
from hdet.user_warning import warn

STATISTICS = ("running_mean", "running_var")
"""Buffers that follow the batches, by the last part of their names."""


class Tail(Spec, family="tail"):
    """Decides at the run's end which weights it ends with."""

    def follow(self, scene: Scene, total_steps: int) -> FollowedTail:
        """The tail at work on one engine's replicas, in a run that is to have so many steps."""
        raise NotImplementedError


@register
class TailAverage(Tail):
    """End with weights averaged over a stretch of the run, if the probe finds them better than the last ones.

    The run's tail is cut into parts at a few shares of the run. The mean of the weights is worked out for each part,
    and so for every stretch from the beginning of one part to the end of the same or a later one. At the end the probe
    compares each stretch with the last weights, on the same batches. With d the difference of the held-out losses
    (below 0 where the mean is better) and e its standard error over sub-batches, the mean with the lowest
    d + significance e is taken, if that is below 0; else the weights stay as they are. Until then training does not
    change.

    Averages smooth what the last steps did by chance. Where data repeat they also overfit less, and a stretch that ends
    before the run does stops early. Where data are always new the last weights of a rate that falls to 0 are as good or
    better, and stay. (Suffix averages: Rakhlin, Shamir and Sridharan 2012, arXiv 1109.5647; over the end of a network's
    training: Izmailov et al. 2018, arXiv 1803.05407.)

    Batch statistics (`running_mean`, `running_var`) are averaged over the windows' ends; other buffers and the
    optimizer's state are left as they are, and what is kept beside the weights (zeros of a pruning mask, master weights
    of an optimizer's own) is not asked. A run whose length is not known beforehand has no tail, and neither has one
    under a Schedule-Free optimizer, whose weights are an average already. Where a guard goes back to an earlier point,
    and where other parameters are trained from some window on, the tail begins anew.

    Args:
        starts: where parts begin, as shares of the run, rising. Each begins with the first window that opens there, and
            ends where the next one begins.
        significance: standard errors by which a mean has to be better. A mean that the last window's batches find worse
            by as many, one at least, is compared on no others.
        draws: where a probe's batches are a function of the window's number, of how many windows: the last one and
            those before, which the function is asked for again. (Batches in a list are always the same.)
        keep: where the means are kept: a copy of the trained weights, in float32 at least, for each part.

    >>> TailAverage(starts=(0.5,)).starts
    (0.5,)
    """

    starts: tuple[float, ...] = Field(default=(0.2, 0.4, 0.7), min_length=1)
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

    def follow(self, scene: Scene, total_steps: int) -> FollowedTail:
        return FollowedTail(self, scene, total_steps)


def possible(tail: Tail | None, optimizer: Optimizer, total_steps: int | None) -> Tail | None:
    """The tail that a run can have: none of unknown length, nor under an optimizer that averages by itself."""
    return None if total_steps is None or is_schedule_free(optimizer) else tail


class TailMean:
    """The mean of weights and batch statistics over some windows on end.

    Attributes:
        start, stop: the first step, and the one after the last. steps: how many, without those of windows left out.
        flags: which of the model's parameters can change. weights: the mean of these, in the model's order.
        buffers: that of the batch statistics, by name.
    """

    def __init__(self, start: int, flags: Sequence[bool], live: Sequence[Tensor], device: str | None = None) -> None:
        self.start, self.stop, self.steps = start, start, 0
        self.flags = list(flags)
        self._device = device
        self.weights = [self._wide(value) for value in live]
        self.buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, weights: Sequence[Tensor], buffers: Mapping[str, Tensor], steps: int, stop: int) -> None:
        """Take in the means of so many steps more; of buffers whose shapes change there is none."""
        if not self.steps:
            self.buffers = {name: self._wide(value).copy_(value) for name, value in buffers.items()}
        self.steps += steps
        self.stop = stop
        share = steps / self.steps
        for mean, value in zip(self.weights, weights, strict=True):
            towards_(mean, value, share)
        kept = {n: m for n, m in self.buffers.items() if n in buffers and buffers[n].shape == m.shape}
        for name, mean in kept.items():
            towards_(mean, buffers[name], share)
        self.buffers = kept

    def _wide(self, value: Tensor) -> Tensor:
        return torch.empty_like(value, dtype=tensors.wide_type(value.dtype), device=self._device)

    def state_dict(self) -> dict[str, Any]:
        return {
            "start": self.start,
            "stop": self.stop,
            "steps": self.steps,
            "flags": list(self.flags),
            "values": tensors.clones(self.weights),
            "buffers": dict(zip(self.buffers, tensors.clones(list(self.buffers.values())), strict=True)),
        }


@dataclass(frozen=True)
class Stretch:
    """The mean over parts on end, each counted by its steps."""

    parts: Sequence[TailMean]

    @property
    def start(self) -> int:
        return self.parts[0].start

    @property
    def stop(self) -> int:
        return self.parts[-1].stop

    def weights(self) -> Iterator[Tensor]:
        """One tensor at a time: no copy of the model is made."""
        return map(self._mean, zip(*(part.weights for part in self.parts), strict=True))

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """With their names; of those that are in all parts with one shape."""
        for name, first in self.parts[0].buffers.items():
            found = [part.buffers[name] for part in self.parts if name in part.buffers]
            if len(found) == len(self.parts) and all(other.shape == first.shape for other in found):
                yield name, self._mean(found)

    def _mean(self, values: Sequence[Tensor]) -> Tensor:
        if len(values) == 1:
            return values[0]
        mean, steps = values[0].clone(), self.parts[0].steps
        for value, part in zip(values[1:], self.parts[1:], strict=True):
            steps += part.steps
            towards_(mean, value, part.steps / steps)
        return mean


class FollowedTail:
    """Keeps the mean of each part: of the windows between two starts, and of those after the last."""

    def __init__(self, spec: TailAverage, scene: Scene, total_steps: int) -> None:
        self.spec = spec
        self.scene = scene
        self.starts = [start * total_steps for start in spec.starts]
        self.parts: list[TailMean] = []
        if not scene.averages.strides:
            scene.follow(None)

    def forget(self) -> None:
        """The run goes on from another point."""
        self.parts = []

    def covers(self, step: int) -> bool:
        """Whether a window that opens at this step is in a part."""
        return step >= self.starts[0]

    def add(self, harvest: Harvest) -> None:
        """A window that is covered has closed."""
        window, moving = harvest.window, self.scene.moving
        weights = self.scene.averaged(harvest.valid, self.scene.averages.strides[0])
        if self.parts and not self._fits(self.parts[-1].flags, self.parts[-1].weights):
            self.forget()
        begun = [first for first in self.starts if window.start >= first]
        if not self.parts or self.parts[-1].start < begun[-1]:
            self.parts.append(TailMean(window.start, moving.flags, moving.values(), self._device))
        buffers = batch_statistics(self.scene.replicas.hosts[0][0])
        self.parts[-1].take(weights, buffers, window.stop - window.start, window.stop)

    def best(self, window: int) -> tuple[Stretch | None, dict[str, float]]:
        """The run is over: the stretch whose mean the probe finds best, if any is better than the last weights.

        Args:
            window: the number of the last one.

        Returns:
            It, and numbers to record: its first step (`start`), the one after its last (`stop`), the `difference` of
            its held-out loss to that of the last weights, and the `stderr` of that; of last weights whose loss is not
            finite there is no difference. `None` and nothing where the last weights are to stay.
        """
        parts, self.parts = self.parts, []
        if not parts or not all(self._fits(part.flags, part.weights) for part in parts):
            return None, {}
        stretches = [Stretch(parts[i : j + 1]) for j in reversed(range(len(parts))) for i in reversed(range(j + 1))]
        stretches, (last, *others) = self._losses(window, stretches)
        means = [own for own in zip(stretches, others, strict=True) if np.isfinite(own[1]).all()]
        if not np.isfinite(last).all():
            return (means[0][0], {"start": means[0][0].start, "stop": means[0][0].stop}) if means else (None, {})
        gains = [_difference(last, losses) for _, losses in means]
        bounds = [gain.slope + self.spec.significance * gain.stderr for gain in gains]
        if min(bounds, default=0.0) >= 0.0:
            return None, {}
        at = int(np.argmin(bounds))
        best, gain = means[at][0], gains[at]
        return best, {"start": best.start, "stop": best.stop, "difference": gain.slope, "stderr": gain.stderr}

    def put(self, stretch: Stretch) -> None:
        """Let every model hold the mean."""
        for host in range(len(self.scene.replicas.hosts)):
            self._put(host, stretch)

    def _losses(self, window: int, stretches: list[Stretch]) -> tuple[list[Stretch], NDArray[np.float64]]:
        """Stretches that the first draw does not find worse, and [1 + these, J] losses of the last weights and of them.

        Of several draws a sub-batch's is the mean over draws, since what these have in common has a scatter too.
        """
        with self.scene.at_base():
            (first,) = self._measured([(window, self.scene.probe.draw(window))], stretches)
            table = self._agreed(first)
            stays = [True, *(not self._worse(table[0], losses) for losses in table[1:])]
            stretches = list(compress(stretches, stays[1:]))
            tables = [table[stays]]
            if stretches and (earlier := self._earlier(window, first.device)):
                tables += map(self._agreed, self._measured(earlier, stretches))
        return stretches, np.mean([own for own in tables if own.shape == tables[0].shape], axis=0)

    def _worse(self, last: NDArray[np.float64], losses: NDArray[np.float64]) -> bool:
        """Whether a mean loses to the last weights by as many standard errors as it has to win by, one at least."""
        if not (np.isfinite(last).all() and np.isfinite(losses).all()):
            return False  # whatever it means is decided on all draws
        lost = _difference(last, losses)
        return lost.slope > max(1.0, self.spec.significance) * lost.stderr

    def _measured(self, draws: Sequence[tuple[int, Sequence[Any]]], stretches: Sequence[Stretch]) -> list[Tensor]:
        """For each draw [1 + stretches, J] probe losses of the last weights and of each mean."""
        probe, (model, optimizer) = self.scene.probe, self.scene.replicas.hosts[0]

        def losses() -> list[Tensor]:
            return [probe.measure(model, at, optimizer, batches) for at, batches in draws]

        rows = [losses()]
        with tensors.put_aside(self.scene.moving.values()):
            for stretch in stretches:
                with tensors.put_aside(list(batch_statistics(model).values())):
                    self._put(0, stretch)
                    rows.append(losses())
        return [torch.stack(draw) for draw in zip(*rows, strict=True)]

    def _agreed(self, table: Tensor) -> NDArray[np.float64]:
        """What the first process has of it: in others the last bits may differ."""
        replicas = self.scene.replicas
        rows = replicas.gather(table.flatten().expand(len(replicas.local), -1))
        told: NDArray[np.float64] = rows[0].reshape(table.shape)
        return told

    def _earlier(self, window: int, device: torch.device) -> list[tuple[int, list[Any]]]:
        """The batches of windows before the last; none where they are the last one's, or a process has them no more."""
        probe, replicas = self.scene.probe, self.scene.replicas
        if not callable(probe.batches):
            return []
        drawn, gone = [], ""
        try:
            drawn = [(at, probe.draw(at)) for at in range(max(0, window - self.spec.draws + 1), window)]
        except Exception as error:  # a run that is over is not to be lost by it, and other processes hear of it
            gone = f"{type(error).__name__}: {error}"
        row = torch.full((len(replicas.local), 1), float(bool(gone)), device=device)
        if not (replicas.gather(row) == 1.0).any():
            return drawn
        warn(
            f"the probe's function does not give the batches of earlier windows again "
            f"({gone or 'in another process'}), so the weights that the run ends with were chosen on the last window's"
        )
        return []

    @torch.no_grad()
    def _put(self, host: int, stretch: Stretch) -> None:
        model = self.scene.replicas.hosts[host][0]
        tensors.reshard(model)
        for own, mean in zip(self.scene.moving.values(host), stretch.weights(), strict=True):
            own.copy_(mean)
        live = batch_statistics(model)
        for name, mean in stretch.buffers():
            if name in live and live[name].shape == mean.shape:
                live[name].copy_(mean)

    @property
    def _device(self) -> str | None:
        return "cpu" if self.spec.keep == "host" else None

    def _fits(self, flags: Sequence[bool], weights: Sequence[Tensor]) -> bool:
        """Whether these are of the parameters that can change now."""
        moving = self.scene.moving
        return list(flags) == moving.flags and [w.shape for w in weights] == [v.shape for v in moving.values()]

    def state_dict(self) -> list[dict[str, Any]]:
        """The parts so far."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore `state_dict`; where that is of other parameters than can change now, the tail begins anew."""
        self.parts = []
        if not all(self._fits(saved["flags"], saved["values"]) for saved in state):
            return
        for saved in state:
            part = TailMean(saved["start"], saved["flags"], self.scene.moving.values(), self._device)
            part.take(saved["values"], saved["buffers"], saved["steps"], saved["stop"])
            self.parts.append(part)


def _difference(some: NDArray[np.float64], others: NDArray[np.float64]) -> Estimate:
    """How far the second [J] losses lie above the first, as a slope."""
    return along((0.0, 1.0), np.stack([some, others]))


def batch_statistics(model: nn.Module) -> dict[str, Tensor]:
    """By name this rank's part of each running mean and variance, as BatchNorm keeps them."""
    named = ((name, tensors.local(buffer.detach())) for name, buffer in model.named_buffers())
    return {
        name: buffer for name, buffer in named if name.rpartition(".")[2] in STATISTICS and buffer.is_floating_point()
    }
