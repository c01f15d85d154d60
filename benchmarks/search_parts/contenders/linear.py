"""A fixed straight line to zero with 30 % warm-up: the schedule the recipe gives a run, and nothing else."""

from __future__ import annotations

from hdet.hparams.schedule import LinearDecay
from hdet.schedules import Schedule
from search_parts.fixed import Fixed


class FixedLinear(Fixed):
    """Tells what of hdet's results is owed to the schedule alone."""

    name = "linear"
    title = "fixed linear"
    order = 12

    def schedule(self, peak: float, steps: int) -> Schedule:
        return LinearDecay(peak=peak, total_steps=steps, warmup=0.3)


CONTENDER = FixedLinear()
