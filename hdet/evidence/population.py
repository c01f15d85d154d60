"""Population based training: replicas keep knob values of their own from window to window, and copies explore."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from hdet.evidence.collector import Evidence
from hdet.evidence.divergent import Divergent, DivergentCollector
from hdet.evidence.scene import Scene, Window
from hdet.hparams.bound import BoundKnob
from hdet.hparams.design import uniform
from hdet.spec import register


@register
class Population(Evidence):
    """Each replica keeps a value of its own; a copy that `hdet.merges.Exploit` made takes its source's, and explores.

    The values of the first window are the spread's levels about the base. With probability `resample` a copy's value is
    drawn anew between the spread's ends, else its source's is moved by `step` up or down. Without `Exploit` all values
    stay. By default no rule moves the base; what a window's losses say of the values is told as by `Divergent`.

    Source: Jaderberg et al. 2017, arXiv 1711.09846.

    Args:
        step: of a perturbed value, in coordinate units; ln 1.2, the paper's factor, in `Log`.
        resample: probability of drawing anew.
    """

    diverges: ClassVar[bool] = True
    sees: ClassVar[frozenset[str]] = frozenset({"update"})

    step: float = Field(default=0.1823, gt=0, kw_only=False)
    resample: float = Field(default=0.25, ge=0, le=1)

    def collect(self, scene: Scene, knobs: Sequence[BoundKnob]) -> PopulationCollector:
        return PopulationCollector(self, scene, knobs)


class PopulationCollector(DivergentCollector):
    """Keeps every member's offsets from the base, and the course that led to them.

    Attributes:
        offsets: [N, K] in coordinate units, within bounds.
        courses: by member, the start of each window of its line and its offsets [K] then.
    """

    def __init__(self, spec: Population, scene: Scene, knobs: Sequence[BoundKnob]) -> None:
        super().__init__(Divergent(), scene, knobs)
        self.population = spec
        n = scene.replicas.size
        self.offsets = np.stack(self.ladders, axis=1) + np.array(self.centres)
        self.courses: list[list[tuple[int, list[float]]]] = [[] for _ in range(n)]
        self._seen = -1

    def open(self, window: Window) -> None:
        if window.index != self._seen:
            self._seen = window.index
            self._inherit(window)
        self._place()
        self.shrink = [0.0] * len(self.knobs)
        self.steps = 0

    def _inherit(self, window: Window) -> None:
        sources = self.scene.lineage.sources or list(range(len(self.offsets)))
        self.offsets = self.offsets[sources]
        self.courses = [list(self.courses[source]) for source in sources]
        for k, knob in enumerate(self.knobs):
            draws = uniform(
                3 * len(sources), seed=self.scene.seed, window=window.index, purpose="explore", names=[knob.name]
            ).reshape(3, -1)
            down, up = knob.spec.space.room(knob.base(window.start), knob.spec.bounds)
            low, high = min(self.ladders[k]) + self.centres[k], max(self.ladders[k]) + self.centres[k]
            for member, source in enumerate(sources):
                if source != member and draws[0, member] < self.population.resample:
                    self.offsets[member, k] = low + draws[1, member] * (high - low)
                elif source != member:
                    self.offsets[member, k] += self.population.step * (1.0 if draws[2, member] < 0.5 else -1.0)
            self.offsets[:, k] = np.clip(self.offsets[:, k], -down, up)
        for member, course in enumerate(self.courses):
            course.append((window.start, self.offsets[member].tolist()))

    def _place(self) -> None:
        for k, knob in enumerate(self.knobs):
            centre = float(self.offsets[:, k].mean())
            knob.spread(self.offsets[:, k] - centre, centre)

    def found(self, name: str, steps: int) -> list[float]:
        """The value of one knob at each of the run's steps, in the line of the member that the run ended with."""
        k = [knob.name for knob in self.knobs].index(name)
        course = self.courses[(self.scene.lineage.sources or [0])[0]]
        stops = [start for start, _ in course[1:]] + [steps]
        return [
            self.knobs[k].displaced(step, offsets[k])
            for (start, offsets), stop in zip(course, stops, strict=True)
            for step in range(start, stop)
        ]

    def state_dict(self) -> dict[str, Any]:
        own = {"offsets": self.offsets.tolist(), "seen": self._seen, "lineage": list(self.scene.lineage.sources)}
        return {**super().state_dict(), **own, "courses": [[list(at) for at in course] for course in self.courses]}

    def load_state_dict(self, state: dict[str, Any], window: Window | None) -> None:
        super().load_state_dict(state, window)
        if len(state["offsets"]) != len(self.offsets):
            return  # another number of members: their values begin at the spread's levels
        self.offsets = np.array(state["offsets"])
        self.courses = [[(int(start), list(offsets)) for start, offsets in course] for course in state["courses"]]
        self._seen = int(state["seen"])
        self.scene.lineage.sources = [int(source) for source in state["lineage"]]
        self._place()
