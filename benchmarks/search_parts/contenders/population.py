"""Population based training: four members, of which bad ones go on as copies of good ones."""

from __future__ import annotations

import hdet
from hdet.evidence import Population
from hdet.merges import Exploit, Merge
from hdet.schedules import Schedule
from hdet.spreads import Symmetric
from search_parts.replicated import Replicated


class PopulationBased(Replicated):
    """Rates from 0.2 to 4.5 times the given one at first; members compare by their training loss over a window."""

    name = "population"
    title = "PBT, 4 members of 1/4"
    order = 41
    whole_runs = True

    def merge(self) -> Merge:
        return Exploit()

    def knob(self, schedule: Schedule) -> hdet.LearningRate:
        return hdet.LearningRate(schedule=schedule, spread=Symmetric(1.5), evidence=Population())


CONTENDER = PopulationBased()
