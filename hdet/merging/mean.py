"""The plain mean, the paper's merge."""

from __future__ import annotations

from pydantic import Field

from hdet.evidence.scene import Harvest, Scene
from hdet.merging.merge import Averager, Merge, OptimizerState
from hdet.spec import register


@register
class Mean(Merge):
    """theta <- mean_r theta_r over valid replicas: parameters and floating buffers, reduced in float32.

    Integer buffers are taken from the first valid replica.

    Args:
        optimizer: what becomes of optimizer state: `average` its tensors (counters are taken over), `keep`
            each replica's own, or `reset` it.
    """

    optimizer: OptimizerState = Field(default="average", kw_only=False)

    def at_work(self, scene: Scene) -> Uniform:
        return Uniform(scene, self.optimizer)


class Uniform(Averager):
    """All valid replicas count alike."""

    def weights(self, harvest: Harvest) -> None:
        return None
