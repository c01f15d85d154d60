"""What every collector of an engine sees, the window it gathers over and what that produced."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from hdet.evidence.parts.batch_statistics import WindowStatistics
from hdet.evidence.parts.excess import excess
from hdet.evidence.parts.unusable import Unusable
from hdet.replicas import Replicas, tensors
from hdet.replicas.anchor import Anchor
from hdet.replicas.average import Averages
from hdet.replicas.moving import Moving
from hdet.signals import Objective, Probe, Signal

Gradients = Literal["shared", "local"]


@dataclass(frozen=True)
class Scene:
    """What every collector of an engine sees.

    Attributes:
        replicas: where the replicas live.
        signal: what they are compared by.
        gradients: whether they share gradients.
        seed: of the designs.
        anchor: the weights at the window's opening.
        moving: the parameters that training can change; "the weights" are these.
        averages: weights averaged over the window, for who asks; the engine feeds them.
        at_base: a context manager inside which every knob is at its base, for probes of the shared weights.
        apart: whether replicas come apart in a window, so that "the weights" are their mean.
        objective: the training loss apart from the loop, for evidence that needs it (`Evidence.needs_objective`).
        sets_apart: targets (`Binding.targets`), of the first host, of the knobs by which replicas come apart.
        outer: by host, the optimizer that the merge steps with: of no weights, its group holds the settings that knobs
            write. Empty where it has none.
        unusable: what was noticed of losses that are not finite, whichever evidence measured them.
    """

    replicas: Replicas
    signal: Signal
    gradients: Gradients
    seed: int
    anchor: Anchor
    moving: Moving
    averages: Averages
    at_base: Callable[[], AbstractContextManager[None]]
    apart: bool
    objective: Objective | None = None
    outer: Sequence[Optimizer] = ()
    unusable: Unusable = field(default_factory=Unusable)
    sets_apart: frozenset[Hashable] = frozenset()

    @cached_property
    def excesses(self) -> tuple[float, float]:
        """How far the run's first weights are from random ones: all, and those that training can change.

        A collective, first asked for in the first window.
        """
        return excess(self.replicas, self.moving, self.opening())

    @property
    def excess(self) -> float:
        """How far all of the run's first weights are from random ones."""
        return self.excesses[0]

    def opening(self) -> list[Tensor]:
        """The weights at the window's opening, where the anchor lies."""
        return self.anchor.values(self.moving.parameters[0])

    def origin(self) -> list[Tensor]:
        """Where a line along the window's update begins, where the anchor lies: the opening, for most optimizers.

        With a Schedule-Free one, it is where the average that it evaluates would be now, had nothing been stepped.
        """
        return self.anchor.origin(self.moving.parameters[0])

    def weights(self, valid: NDArray[np.bool_]) -> list[Tensor]:
        """A copy of the weights now; the mean over valid replicas where these have come apart (a collective then)."""
        if self.apart:
            return self.replicas.combine(valid / valid.sum(), self.moving.flags)
        return tensors.clones(self.moving.values())

    def follow(self, stride: int | None) -> None:
        """Average the weights from now on: of one model, or of all this process hosts where they come apart."""
        for host in range(len(self.replicas.hosts) if self.apart else 1):
            self.averages.follow(host, stride)

    def averaged(self, valid: NDArray[np.bool_], stride: int | None, *, before: bool = False) -> list[Tensor]:
        """The window-averaged weights, where averages lie; the mean over valid replicas where these have come apart (a
        collective).

        Args:
            before: of the window before, where no step has been made in this one.
        """
        if not self.apart:
            return self.averages.follow(0, stride).mean(before=before)
        with ExitStack() as stack:
            for host in range(len(self.replicas.hosts)):
                means = self.averages.follow(host, stride).mean(before=before)
                stack.enter_context(tensors.substituted(self.moving.values(host), means))
            return self.replicas.combine(valid / valid.sum(), self.moving.flags)

    @property
    def probe(self) -> Probe:
        """The probe, for evidence that needs one (the engine refuses such evidence without)."""
        assert isinstance(self.signal, Probe)
        return self.signal


class OuterStep(Protocol):
    """A step that the merge's own optimizer is about to make, from replicas that have become one."""

    def at(self, settings: Mapping[str, float]) -> Callable[[Sequence[Tensor]], None]:
        """Writes the weights it would lead to, with these settings in place of its own, over those of a model."""


@dataclass(frozen=True)
class Window:
    """A window under way: its number, the steps `start <= t < stop` it covers, and the run's length if known."""

    index: int
    start: int
    stop: int
    total_steps: int | None = None


@dataclass(frozen=True)
class Harvest:
    """What a window produced.

    Attributes:
        losses: [N] mean training losses, NaN where not finite.
        valid: [N] replicas whose losses and parameters all stayed finite; at least one.
        statistics: of BatchNorm layers, as far as evidence has asked for them.
    """

    window: Window
    losses: NDArray[np.float64]
    valid: NDArray[np.bool_]
    statistics: WindowStatistics = field(default_factory=WindowStatistics, compare=False)

    @property
    def loss(self) -> float | None:
        """Mean training loss over the valid replicas; None where one of them reported none."""
        mean = float(self.losses[self.valid].mean())
        return mean if math.isfinite(mean) else None
