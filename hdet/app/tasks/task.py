"""A task is a declaration; building it gives a workload: a model, its data and its losses.

The training loop knows nothing of text or images. It asks a `Workload` for a fresh model, for the batch of a
step and a replica, and for losses. Batches are pure functions of (seed, step, replica), so a resumed run sees
exactly the data that the killed one would have seen, and N replicas never share a batch by accident.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor, nn

from hdet.errors import ConfigError
from hdet.spec import Spec

Batch = Any

WORKLOAD = ("facts", "model", "groups", "batch", "loss", "probe", "test_loss")
"""What a `Workload` has."""


@runtime_checkable
class Workload(Protocol):
    """What a training loop needs of a task. Any object with these seven members will do.

    Attributes:
        facts: what was loaded, for people: split sizes, content hashes. Shown and kept with the results.
    """

    facts: Mapping[str, str]

    def model(self) -> nn.Module:
        """A freshly initialised model on the device; the same at each call, the global RNG untouched."""

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer: `{"name": ..., "params": [...]}` plus torch's own options."""

    def batch(self, step: int, replica: int) -> Batch:
        """The training batch of one replica at one step; a pure function of its arguments and the seed."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The scalar mean loss; in eval mode free of dropout, label smoothing and the like."""

    def probe(self, window: int) -> Sequence[Batch]:
        """The held-out sub-batches by which the replicas of one window are compared; fresh each window."""

    def test_loss(self, model: nn.Module) -> float:
        """The mean loss in eval mode on test data that nothing else touches; the model is left as it was."""


def decaying_matrices(model: nn.Module) -> list[dict[str, Any]]:
    """The groups `decay` and `no_decay`: matrices decay; biases and norms do not."""
    parameters = list(model.parameters())
    return [
        {"name": "decay", "params": [p for p in parameters if p.dim() >= 2]},
        {"name": "no_decay", "params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def whole(workload: object, task: str) -> Workload:
    """What a task, which may be somebody's own, was built to.

    Raises:
        ConfigError: it lacks members of a workload.
    """
    missing = [name for name in WORKLOAD if not hasattr(workload, name)]
    if missing:
        raise ConfigError(
            f"{task} returned a {type(workload).__name__} without {', '.join(missing)}; "
            f"a workload has {', '.join(WORKLOAD)}"
        )
    return cast(Workload, workload)


class Task(Spec, family="task"):
    """The root of the built-in tasks (`text`, `digits`), of `imported` ones and of those users register."""

    def build(self, *, seed: int, batch_size: int, device: str = "cpu") -> Workload:
        """Load the data and return the workload.

        Args:
            seed: decides the initial weights and every batch.
            batch_size: examples a replica sees in a step.
            device: where models and batches live, as torch names it.

        Raises:
            ConfigError: the data cannot serve the declaration.
            MissingExtraError: the task needs a package that is not installed.
        """
        raise NotImplementedError
