"""How N replicas become one: the root of merges, and what one is at work."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch.optim import Optimizer

from hdet.errors import ConfigError
from hdet.evidence.parts.losses_at import Write
from hdet.evidence.scene import Harvest, Scene
from hdet.spec import Spec

OptimizerState = Literal["average", "keep", "reset"]
"""What becomes of optimizer state: its tensors are averaged, each replica keeps its own, or it is dropped."""


class Merge(Spec, family="merge"):
    """Turns N diverged replicas into N copies of one model.

    Attributes:
        is_mean: whether the result is a weighted mean of the replicas, so that alike ones stay as they are.
        makes_alike: whether all replicas hold the same weights after it.
    """

    is_mean: ClassVar[bool] = True
    makes_alike: ClassVar[bool] = True

    def outer_optimizer(self) -> Optimizer | None:
        """The optimizer that it steps with, of no weights: its settings, for knobs to write; None where there is none.

        Raises:
            ConfigError: the one declared cannot be made.
        """
        return None

    @abstractmethod
    def at_work(self, scene: Scene) -> Merger:
        """The merge at work on one engine's replicas.

        Raises:
            ConfigError: it cannot merge these.
        """


class Merger(ABC):
    """A merge at work, with what it remembers between windows.

    Attributes:
        moves_alike: whether it moves replicas that hold the same weights too, so that it is asked even then.
    """

    moves_alike: ClassVar[bool] = False

    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    def open_apart(self) -> None:  # noqa: B027
        """A window opens, and nothing has made the replicas alike yet."""

    @abstractmethod
    def merge(self, harvest: Harvest) -> list[int] | None:
        """Overwrite every replica by the merge of the valid ones.

        A replica that is not valid (a non-finite loss or parameter) takes no part, but receives the result.

        Returns:
            None where all have become one; else [N] the index of the replica that each is a copy of now, its own where
            it was left as it is.
        """

    @property
    def steps(self) -> bool:
        """Whether, after `merge`, an optimizer of its own is about to step."""
        return False

    def step(self) -> None:  # noqa: B027
        """The replicas are one: move them on from there, if that is part of the merge."""

    def at(self, settings: Mapping[str, float]) -> Write:
        """Where `step` would lead with these settings (`hdet.evidence.scene.OuterStep`; asked if `steps`)."""
        raise NotImplementedError

    def end(self) -> list[int] | None:
        """The run ends at this window's end, which was not known as it merged. Returns as `merge`, and None where all
        had become one."""
        return None

    def forget(self) -> None:  # noqa: B027
        """The run went back to an earlier point: what is remembered came from where it led astray."""

    def restored(self) -> list[int] | None:
        """All replicas failed, and this process has put its own back to the window's opening. Returns as `merge`."""
        self.forget()
        return None

    def state_dict(self) -> dict[str, Any]:
        """What outlives windows, as plain numbers and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore `state_dict`.

        Raises:
            CheckpointError: it is of another merge or another model.
        """


def part_of(share: float, count: int) -> int:
    """How many a share of so many are, rounded down, but for what rounding took from a whole number.

    >>> part_of(0.58, 50), int(0.58 * 50)
    (29, 28)
    """
    return math.floor(share * count * (1.0 + 1e-12))


class Averager(Merger):
    """A merge that is a weighted mean: theta <- sum_r w_r theta_r."""

    def __init__(self, scene: Scene, optimizer: OptimizerState) -> None:
        super().__init__(scene)
        if optimizer != "average" and scene.moving.evaluates_average:
            raise ConfigError(
                f"optimizer={optimizer!r} would merge the weights that a Schedule-Free optimizer trains and not those "
                f"that it steps, which are its state; merge with optimizer='average'"
            )
        self.optimizer = optimizer

    @abstractmethod
    def weights(self, harvest: Harvest) -> NDArray[np.float64] | None:
        """[N] or [N, P] weights as `hdet.replicas.Replicas.mean` takes them; None where all valid replicas count alike.

        A function of what is the same in every process, as each decides by itself.
        """

    def merge(self, harvest: Harvest) -> list[int] | None:
        weights = self.weights(harvest)
        counts = None if weights is None else np.asarray(weights, dtype=np.float64)
        self.scene.replicas.mean(harvest.valid.tolist(), self.optimizer, counts)
        return None

    def restored(self) -> list[int] | None:
        self.forget()
        if self.optimizer == "keep":  # each process has put back the state of its own first replica
            self.scene.replicas.take_first_state()
        return None
