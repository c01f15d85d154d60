"""The paper's algorithm with its errata corrected: diverging replicas, judged by their training loss."""

from __future__ import annotations

import hdet
from search_parts.replicated import Replicated
from search_parts.task import Setting

WINDOWS = 24


class PaperRule(Replicated):
    """Four replicas, a quarter of the batch each, shared gradients, 24 windows; the paper's other settings.

    The replicas see one plain run's examples between them, so they cost one plain run.
    """

    name = "paper"
    title = "the paper's rule"
    order = 40

    def engine(
        self,
        replicas: hdet.replicas.Replicas,
        setting: Setting,
        steps: int,
        seed: int,
        objective: hdet.Objective | None = None,
    ) -> hdet.Engine:
        window = max(1, steps // WINDOWS)
        return hdet.paper_engine(replicas, max_lr=setting.lr, total_steps=steps, window=window, seed=seed)


CONTENDER = PaperRule()
