"""What only an ablation wants: controls that nobody should train with. Import it by `imports:` in a run."""

from __future__ import annotations

from typing import ClassVar

from hdet.evidence.scene import Harvest, Scene
from hdet.merging import Merge, Merger
from hdet.spec import register


@register
class Apart(Merge):
    """No merge: every replica goes its own way from window to window, and the result is the first replica's.

    The rows of the paper's Table 1 that do not average. It breaks the engine's promise that a window opens
    with all replicas alike, and a replica that fails stays failed.
    """

    makes_alike: ClassVar[bool] = False

    def at_work(self, scene: Scene) -> Alone:
        return Alone(scene)


class Alone(Merger):
    """Leaves every replica as it is."""

    def merge(self, harvest: Harvest) -> None:
        """Nothing."""
