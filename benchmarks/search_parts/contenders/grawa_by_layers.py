"""GRAWA by layers: each layer's weights by its own gradient norms."""

from __future__ import annotations

from hdet.contrib import Grawa
from hdet.merges import Merge
from search_parts.contenders.grawa import ByGradientNorm


class ByLayersGradientNorm(ByGradientNorm):
    """Otherwise as GRAWA of the whole model."""

    name = "grawa_by_layers"
    title = "GRAWA by layers, fixed cosine"
    order = 46

    def merge(self) -> Merge:
        return Grawa(layers=True, optimizer="keep")


CONTENDER = ByLayersGradientNorm()
