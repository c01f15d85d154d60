"""What only an ablation wants: controls that nobody should train with. Import it by `imports:` in a run."""

from __future__ import annotations

from collections.abc import Sequence

from hdet.replicas import Replicas
from hdet.replicas.merge import Merge
from hdet.spec import register


@register
class Apart(Merge):
    """No merge: every replica goes its own way from window to window, and the result is the first replica's.

    The rows of the paper's Table 1 that do not average. It breaks the engine's promise that a window opens
    with all replicas alike, and a replica that fails stays failed.
    """

    def __call__(self, replicas: Replicas, valid: Sequence[bool]) -> None:
        """Nothing."""
