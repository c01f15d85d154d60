"""DiLoCo: replicas with local gradients, and an outer optimizer's step where they meet."""

from __future__ import annotations

from hdet.merges import Merge, Outer
from search_parts.replicated import Replicated


class DiLoCo(Replicated):
    """The rate is the given one, under the fixed cosine."""

    name = "diloco"
    title = "DiLoCo, fixed cosine"
    order = 43
    adaptive = False

    def merge(self) -> Merge:
        return Outer()


CONTENDER = DiLoCo()
