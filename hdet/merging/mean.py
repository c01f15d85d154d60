"""The plain mean, the paper's merge and the best of those measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from hdet.merging.merge import Merge
from hdet.replicas import Replicas
from hdet.spec import register


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
