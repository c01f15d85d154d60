"""A fixed cosine schedule with 30 % warm-up."""

from __future__ import annotations

from hdet.schedules import Cosine, Schedule
from search_parts.fixed import Fixed


class FixedCosine(Fixed):
    """What is swept for the oracle, too."""

    name = "cosine"
    title = "fixed cosine"
    order = 10

    def schedule(self, peak: float, steps: int) -> Schedule:
        return Cosine(peak=peak, total_steps=steps, warmup=0.3)


CONTENDER = FixedCosine()
