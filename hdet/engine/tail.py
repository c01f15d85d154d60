"""The tail: a run ends with averaged weights where a held-out loss finds them better than the last ones."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, field_validator
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.engine.mixture import Pair, Shares, lowest, nodes
from hdet.evidence import Harvest, Scene
from hdet.evidence.parts.batch_statistics import BatchStatistics, Statistics, statistics_of
from hdet.evidence.parts.line_fit import along
from hdet.replicas import tensors
from hdet.replicas.average import towards_
from hdet.replicas.batch_norm import following, keeping
from hdet.replicas.schedule_free import is_schedule_free
from hdet.spec import Spec, register
from hdet.user_warning import warn

LAST = (0, 0)
"""Among `nodes`, the last weights."""

Draw = tuple[int, Sequence[Any]]
"""A window's number, and the probe's batches of it."""


class Tail(Spec, family="tail"):
    """Decides at the run's end which weights it ends with."""

    def follow(self, scene: Scene, total_steps: int) -> FollowedTail:
        """The tail at work on one engine's replicas, in a run that is to have so many steps."""
        raise NotImplementedError


@register
class TailAverage(Tail):
    """End with averaged weights, if the probe finds them better than the last ones.

    The run's tail is cut into parts at a few shares of the run, and the mean of the weights is worked out for each.
    At the end the probe compares mixtures of these means and of the last weights: each by itself and each pair half and
    half. A quadratic goes through these losses; its lowest point tells which two parts are best mixed with the last
    weights, and at which shares. With d the difference of a held-out loss to that of the last weights (below 0 where
    the mixture is better) and e its standard error over sub-batches, the mixture with the lowest d + significance e is
    taken, if that is below 0; else the weights stay as they are. Until then training does not change.

    Averages smooth what the last steps did by chance. Where data repeat they also overfit less, and an early part's
    mean stops early. Where data are always new the last weights of a rate that falls to 0 are as good or better, and
    stay. (Suffix averages: Rakhlin, Shamir and Sridharan 2012, arXiv 1109.5647; over the end of a network's training:
    Izmailov et al. 2018, arXiv 1803.05407; shares that are learnt: Li et al. 2022, arXiv 2205.13104.)

    BatchNorm's running statistics are those of the mixture, as far as a held-out batch tells how they change with the
    weights. Other buffers and the optimizer's state are left as they are, and what is kept beside the weights (zeros of
    a pruning mask, master weights of an optimizer's own) is not asked. A run whose length is not known beforehand has
    no tail, and neither has one under a Schedule-Free optimizer, whose weights are an average already. Where a guard
    goes back to an earlier point, and where other parameters are trained from some window on, the tail begins anew.

    Args:
        starts: where parts begin, as shares of the run, rising. Each begins with the first window that opens there, and
            ends where the next one begins.
        significance: standard errors by which a mixture has to be better.
        draws: where a probe's batches are a function of the window's number, of how many windows: the last one and
            those before, which the function is asked for again, for the two parts that the last one's call for.
            (Batches in a list are always the same.)
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

    def most_evaluations(self, model: nn.Module) -> int:
        """How often a window's probe is evaluated at the run's end at the most.

        All mixtures on the last draw, those of two parts on the others, and the best of all on each; once more for each
        on the last draw for BatchNorm's statistics.

        >>> TailAverage().most_evaluations(nn.Linear(2, 2)), TailAverage().most_evaluations(nn.BatchNorm1d(2))
        (32, 43)
        """
        size = 1 + len(self.starts)
        every, two = nodes(range(size), size), nodes(range(min(3, size)), size)
        restated = len(every) + 1 if keeping(model) else 0
        return len(every) + (self.draws - 1) * len(two) + self.draws + restated

    def follow(self, scene: Scene, total_steps: int) -> FollowedTail:
        return FollowedTail(self, scene, total_steps)


def possible(tail: Tail | None, optimizer: Optimizer, total_steps: int | None) -> Tail | None:
    """The tail that a run can have: none of unknown length, nor under an optimizer that averages by itself."""
    return None if total_steps is None or is_schedule_free(optimizer) else tail


class TailMean:
    """The mean of the weights over some windows on end.

    Attributes:
        start, stop: the first step, and the one after the last. steps: how many, without those of windows left out.
        flags: which of the model's parameters can change. weights: the mean of these, in the model's order.
    """

    def __init__(self, start: int, flags: Sequence[bool], live: Sequence[Tensor], device: str | None = None) -> None:
        self.start, self.stop, self.steps = start, start, 0
        self.flags = list(flags)
        self.weights = [torch.empty_like(own, dtype=tensors.wide_type(own.dtype), device=device) for own in live]

    @torch.no_grad()
    def take(self, weights: Sequence[Tensor], steps: int, stop: int) -> None:
        """Take in the mean of so many steps more."""
        self.steps += steps
        self.stop = stop
        for mean, value in zip(self.weights, weights, strict=True):
            towards_(mean, value, steps / self.steps)

    def state_dict(self) -> dict[str, Any]:
        return {
            "start": self.start,
            "stop": self.stop,
            "steps": self.steps,
            "flags": list(self.flags),
            "values": tensors.clones(self.weights),
        }


@dataclass(frozen=True)
class Mixture:
    """A mean of the last weights and of the parts', by shares.

    Attributes:
        shares: [1 + parts], that of the last weights first.
        statistics: of BatchNorm layers, for it.
    """

    shares: Shares
    parts: Sequence[TailMean]
    statistics: Statistics

    def told(self) -> dict[str, Any]:
        """To record: the last weights' share (`last`), and of each part that has one its steps and its `share`."""
        counted = [(part, float(share)) for part, share in zip(self.parts, self.shares[1:], strict=True) if share]
        told = [{"start": part.start, "stop": part.stop, "share": share} for part, share in counted]
        return {"last": float(self.shares[0]), "parts": told}


class MixtureLosses:
    """Held-out losses of mixtures, in the first model, whose last weights are put aside meanwhile.

    Args:
        layers: names of the BatchNorm layers whose statistics followed the batches.
        last: a copy of the last weights.
        draw: the last window and its batches, which tell how BatchNorm's statistics change with the weights.
    """

    def __init__(
        self, scene: Scene, parts: Sequence[TailMean], layers: Sequence[str], last: Sequence[Tensor], draw: Draw
    ) -> None:
        self.scene, self.parts, self.last = scene, parts, last
        self.model, self.optimizer = scene.replicas.hosts[0]
        held = keeping(self.model)
        followed = {name: held[name] for name in layers if name in held}
        self._statistics = BatchStatistics.by_probe(followed, scene.probe, scene.replicas.hosts[0], *draw)
        self._found: dict[tuple[float, ...], Statistics] = {}

    def of(self, draws: Sequence[Draw], at: Iterable[Shares]) -> list[NDArray[np.float64]]:
        """For each draw [mixtures, J] probe losses, those of the first process: elsewhere the last bits may differ."""
        probe, replicas = self.scene.probe, self.scene.replicas
        rows = []
        for shares in at:
            write(self.scene.moving.values(), mixed(shares, self.last, self.parts))
            self.statistics(shares).put(self.model)
            rows.append(
                [probe.measure(self.model, window, self.optimizer, own, kept_statistics=True) for window, own in draws]
            )
        tables = [torch.stack(own) for own in zip(*rows, strict=True)]
        return [replicas.gather(t.flatten().expand(len(replicas.local), -1))[0].reshape(t.shape) for t in tables]

    def statistics(self, shares: Shares) -> Statistics:
        """Of the mixture that the model holds; of the last weights their own."""
        key = tuple(shares.tolist())
        if key not in self._found:
            self._found[key] = self._statistics.last if shares[0] == 1.0 else self._statistics.limited()
        return self._found[key]


class FollowedTail:
    """Keeps the mean of each part: of the windows between two starts, and of those after the last.

    Attributes:
        layers: names of the BatchNorm layers whose statistics followed the batches, in the last window taken in.
    """

    def __init__(self, spec: TailAverage, scene: Scene, total_steps: int) -> None:
        self.spec = spec
        self.scene = scene
        self.starts = [start * total_steps for start in spec.starts]
        self.parts: list[TailMean] = []
        self.layers: list[str] = []
        self._parameters: list[nn.Parameter] = []  # whose weights the parts are of, in their order
        if not scene.averages.strides:
            scene.follow(None)

    def forget(self) -> None:
        """The run is over, or goes on from another point."""
        self.parts, self.layers = [], []

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
        self._parameters = list(moving.parameters[0])
        if not self.parts or self.parts[-1].start < begun[-1]:
            self.parts.append(TailMean(window.start, moving.flags, moving.values(), self._device))
        self.parts[-1].take(weights, window.stop - window.start, window.stop)
        self.layers = list(following(self.scene.replicas.hosts[0][0]))

    def best(self, window: int) -> tuple[Mixture | None, dict[str, Any]]:
        """The run is over: the mixture that the probe finds best, if any is better than the last weights.

        The last draw tells which two parts are best mixed with the last weights, if any are; of these all draws tell.

        Args:
            window: the number of the last one.

        Returns:
            It, and what to record: its shares (`Mixture.told`), the `difference` of its held-out loss to that of the
            last weights, and the `stderr` of that; of last weights whose loss is not finite there is no difference.
            `None` and nothing where the last weights are to stay.
        """
        parts = self.parts
        if not parts or not all(self._fits(part.flags, part.weights) for part in parts):
            return None, {}
        draw = (window, self.scene.probe.draw(window))
        buffers = statistics_of(self.scene.replicas.hosts[0][0])
        with (
            self.scene.at_base(),
            tensors.put_aside(buffers),
            tensors.put_aside(self.scene.moving.values()) as last,
        ):
            compared = MixtureLosses(self.scene, parts, self.layers, last, draw)
            shares, told = self._best(compared, draw)
            if shares is None:
                return None, {}
            best = Mixture(shares, parts, compared.statistics(shares))
        return best, best.told() | told

    def _best(self, compared: MixtureLosses, draw: Draw) -> tuple[Shares | None, dict[str, float]]:
        """The shares to end with, and the difference; None where the last weights are to stay."""
        size = 1 + len(compared.parts)
        grid = nodes(range(size), size)
        (table,) = compared.of([draw], grid.values())
        losses = dict(zip(grid, table, strict=True))
        if not np.isfinite(losses[LAST]).all():
            return _soundest(grid, losses), {}
        of = _promising(losses, size)
        if len(of) == 1:
            return None, {}
        grid = nodes(of, size)
        earlier = self._earlier(draw[0])
        table = _over_draws([[losses[pair] for pair in grid], *compared.of(earlier, grid.values())])
        losses = dict(zip(grid, table, strict=True))
        if not np.isfinite(losses[LAST]).all():
            return _soundest(grid, losses), {}
        shares = list(grid.values())
        at, _ = lowest(of, dict(zip(grid, table - table[0], strict=True)), size)
        if not any(np.array_equal(at, node) for node in shares):
            shares.append(at)
            table = np.concatenate([table, _over_draws(compared.of([draw, *earlier], [at]))])
        gains = [along((0.0, 1.0), np.stack([table[0], own])) for own in table]
        bounds = [gain.slope + self.spec.significance * gain.stderr if gain.known else np.inf for gain in gains]
        best = int(np.argmin(bounds))
        if bounds[best] >= 0.0:
            return None, {}
        return shares[best], {"difference": gains[best].slope, "stderr": gains[best].stderr}

    def put(self, mixture: Mixture) -> None:
        """Let every model hold it."""
        for host, (model, _) in enumerate(self.scene.replicas.hosts):
            live = self.scene.moving.values(host)
            write(live, mixed(mixture.shares, live, mixture.parts))
            mixture.statistics.put(model)

    def _earlier(self, window: int) -> list[Draw]:
        """The batches of windows before the last; none where they are the last one's, or a process has them no more."""
        probe, replicas = self.scene.probe, self.scene.replicas
        if not callable(probe.batches):
            return []
        gone, drawn = "", list[Draw]()
        try:
            drawn = [(at, probe.draw(at)) for at in range(max(0, window - self.spec.draws + 1), window)]
        except Exception as error:  # a run that is over is not to be lost by it, and other processes hear of it
            gone = f"{type(error).__name__}: {error}"
        row = torch.full((len(replicas.local), 1), float(bool(gone)), device=self.scene.moving.values()[0].device)
        if not (replicas.gather(row) == 1.0).any():
            return drawn
        warn(
            f"the probe's function does not give the batches of earlier windows again "
            f"({gone or 'in another process'}), so the weights that the run ends with were chosen on the last window's"
        )
        return []

    @property
    def _device(self) -> str | None:
        return "cpu" if self.spec.keep == "host" else None

    def _fits(self, flags: Sequence[bool], weights: Sequence[Tensor]) -> bool:
        """Whether these are of the parameters that can change now, in their order: some tools register one anew."""
        moving = self.scene.moving
        now, then = moving.parameters[0], self._parameters
        same = len(now) == len(then) and all(map(operator.is_, now, then))
        return same and list(flags) == moving.flags and [w.shape for w in weights] == [v.shape for v in moving.values()]

    def state_dict(self) -> dict[str, Any]:
        """The parts so far."""
        return {"layers": list(self.layers), "parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; where that is of other parameters than can change now, the tail begins anew."""
        self.forget()
        self._parameters = list(self.scene.moving.parameters[0])
        if not all(self._fits(saved["flags"], saved["values"]) for saved in state["parts"]):
            return
        self.layers = list(state["layers"])
        for saved in state["parts"]:
            part = TailMean(saved["start"], saved["flags"], self.scene.moving.values(), self._device)
            part.take(saved["values"], saved["steps"], saved["stop"])
            self.parts.append(part)


def mixed(shares: Shares, last: Sequence[Tensor], parts: Sequence[TailMean]) -> Iterator[Tensor]:
    """The mean of the last weights and of the parts' by shares, one tensor at a time: no copy of the model is made."""
    for values in zip(last, *(part.weights for part in parts), strict=True):
        mean = torch.zeros_like(values[0], dtype=tensors.wide_type(values[0].dtype))
        for value, share in zip(values, shares.tolist(), strict=True):
            if share:  # what has none may not be finite
                mean.add_(value.to(mean), alpha=share)
        yield mean


@torch.no_grad()
def write(weights: Sequence[Tensor], values: Iterable[Tensor]) -> None:
    """Let weights be these."""
    for own, value in zip(weights, values, strict=True):
        own.copy_(value)


def _promising(losses: Mapping[Pair, NDArray[np.float64]], size: int) -> Sequence[int]:
    """The last weights (0), and the two parts whose mixture with them has the lowest loss, if that is lower."""
    above = {pair: own - losses[LAST] for pair, own in losses.items()}
    best: Sequence[int] = (0,)
    lowest_yet = 0.0
    for parts in combinations(range(1, size), min(2, size - 1)):
        of = (0, *parts)
        _, value = lowest(of, above, size)
        if value < lowest_yet:
            best, lowest_yet = of, value
    return best


def _soundest(grid: Mapping[Pair, Shares], losses: Mapping[Pair, NDArray[np.float64]]) -> Shares | None:
    """In place of last weights whose loss is not finite the part with the lowest one, if any has one."""
    sound = [pair for pair in grid if pair[0] == pair[1] and np.isfinite(losses[pair]).all()]
    return grid[min(sound, key=lambda pair: float(losses[pair].mean()))] if sound else None


def _over_draws(tables: Sequence[Any]) -> NDArray[np.float64]:
    """[mixtures, J]: of a sub-batch the mean over draws with as many, since what draws have in common scatters too."""
    arrays = [np.asarray(table, dtype=np.float64) for table in tables]
    return np.asarray(np.mean([own for own in arrays if own.shape == arrays[0].shape], axis=0))
