"""Evolution strategies on the learning rate, over replicas with shared gradients."""

from __future__ import annotations

from typing import ClassVar, Literal

import hdet
from hdet.contrib import Adam, Antithetic, EvolutionStrategy, Gaussian
from hdet.schedules import Schedule
from search_parts.replicated import Replicated


class Evolution(Replicated):
    """Mirrored normal levels, ranked training losses, a step by Adam (docs/populations.md)."""

    name = "evolution"
    title = "evolution strategies"
    order = 42
    gradients: ClassVar[Literal["shared", "local"]] = "shared"

    def knob(self, schedule: Schedule) -> hdet.LearningRate:
        evidence = hdet.evidence.Divergent(design=Antithetic(), estimator=EvolutionStrategy())
        return hdet.LearningRate(schedule=schedule, spread=Gaussian(0.3), evidence=evidence, controller=Adam(0.2))


CONTENDER = Evolution()
