"""The root of merges: how N replicas become one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from hdet.replicas import Replicas
from hdet.spec import Spec


class Merge(Spec, family="merge"):
    """Turns N diverged replicas into N copies of one model."""

    @abstractmethod
    def __call__(self, replicas: Replicas, valid: Sequence[bool]) -> None:
        """Overwrite every replica by the merge of the valid ones.

        Args:
            valid: [N]; a replica with a non-finite loss or parameter takes no part, but receives the result.
        """
