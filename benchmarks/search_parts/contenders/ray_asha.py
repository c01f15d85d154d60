"""Asynchronous successive halving (ASHA, Li et al. 2020, arXiv:1810.05934), as Ray Tune has it: random settings."""

from __future__ import annotations

from hdet.errors import MissingExtraError
from search_parts.stopped_early import RUNGS, SHARE, Search, StoppedEarly
from search_parts.task import Setting, Task
from search_parts.trials import draw


class RayASHA(StoppedEarly):
    """Ray's scheduler at its defaults: it judges after one and four of five parts of a trial, and keeps a quarter."""

    name = "ray_asha"
    title = "ASHA (Ray Tune's), random settings"
    needs = "ray"

    def search(self, task: Task, given: Setting, seed: int) -> Search:
        try:
            from search_parts.ray_halving import RayHalving
        except ImportError:
            raise MissingExtraError("ray", "ray") from None
        return RayHalving(draw(task, given, seed, 2 * SHARE * RUNGS))  # half of it pays for all, each stopped at once


CONTENDER = RayASHA()
