"""A fixed OneCycle schedule, at torch's defaults."""

from __future__ import annotations

from hdet.schedules import OneCycle, Schedule
from search_parts.fixed import Fixed


class FixedOneCycle(Fixed):
    """torch.optim.lr_scheduler.OneCycleLR's learning rates; momentum is left alone."""

    name = "onecycle"
    title = "fixed OneCycle"
    order = 11

    def schedule(self, peak: float, steps: int) -> Schedule:
        return OneCycle(peak, total_steps=steps)


CONTENDER = FixedOneCycle()
