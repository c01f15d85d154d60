"""How N replicas become one: the root of merges, and the plain mean, the paper's and the best of those measured."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from hdet.replicas.replicas import Replicas
from hdet.spec import Spec, register


class Merge(Spec, family="merge"):
    """Turns N diverged replicas into N copies of one model."""

    @abstractmethod
    def __call__(self, replicas: Replicas, valid: Sequence[bool]) -> None:
        """Overwrite every replica by the merge of the valid ones.

        Args:
            valid: [N]; a replica with a non-finite loss or parameter takes no part, but receives the result.
        """


@register
class Mean(Merge):
    """theta <- mean_r theta_r over valid replicas: parameters and floating buffers, reduced in float32.

    Integer buffers are taken from the first valid replica.

    Args:
        optimizer: what becomes of optimizer state: `average` its tensors (counters are taken over), `keep`
            each replica's own, or `reset` it.
    """

    optimizer: Literal["average", "keep", "reset"] = Field(default="average", kw_only=False)

    def __call__(self, replicas: Replicas, valid: Sequence[bool]) -> None:
        replicas.mean(valid, self.optimizer)
