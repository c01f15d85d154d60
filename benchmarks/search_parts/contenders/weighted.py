"""Replicas with local gradients, merged by weights that favour lower losses."""

from __future__ import annotations

from hdet.contrib import Weighted
from hdet.merges import Merge
from search_parts.replicated import Replicated


class ByLoss(Replicated):
    """The rate is the given one, under the fixed cosine."""

    name = "weighted"
    title = "weighted merges, fixed cosine"
    order = 44
    adaptive = False

    def merge(self) -> Merge:
        return Weighted(optimizer="keep")


CONTENDER = ByLoss()
