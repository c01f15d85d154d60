"""Population based training: replicas keep knob values of their own from window to window, and copies explore."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hdet.controllers import Controller, Hold
from hdet.evidence.collector import Evidence
from hdet.evidence.divergent import Divergent, DivergentCollector
from hdet.evidence.scene import Scene, Window
from hdet.hparams.bound_knob import BoundKnob
from hdet.hparams.design import uniform
from hdet.hparams.knob import Knob
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

    def default_controller(self, knob: Knob) -> Controller:
        return Hold()


class PopulationCollector(DivergentCollector):
    """Keeps every member's offsets from the base, and how they came about.

    Attributes:
        offsets: [N, K] in coordinate units, within bounds.
        sources: [N] whom each member goes on from, as the last merge had it.
        opened: of each window its start, whom each member had gone on from, the offsets, and the [K] bases' shifts.
    """

    by_member: ClassVar[bool] = True

    def __init__(self, spec: Population, scene: Scene, knobs: Sequence[BoundKnob]) -> None:
        super().__init__(Divergent(), scene, knobs)
        self.population = spec
        self.offsets = self._levels()
        self.opened: list[tuple[int, list[int], list[list[float]], list[float]]] = []
        self.sources = self._everyone()
        self._seen = -1
        self._stop = 0

    def _everyone(self) -> list[int]:
        """Each member goes on from itself."""
        return list(range(self.scene.replicas.size))

    def _levels(self) -> NDArray[np.float64]:
        """[N, K] what the members begin with."""
        levels: NDArray[np.float64] = np.stack(self.ladders, axis=1) + np.array(self.centres)
        return levels

    def open(self, window: Window) -> None:
        if window.index != self._seen:
            self._seen = window.index
            self._inherit(window)
        self._place_all()

    def _place_all(self) -> None:
        for knob, offsets in zip(self.knobs, self._in_force().T, strict=True):
            _place(knob, offsets)

    def _in_force(self) -> NDArray[np.float64]:
        """[N, K] what bounds left of the offsets as the latest window opened."""
        return np.array(self.opened[-1][2]) if self.opened else self.offsets

    def _inherit(self, window: Window) -> None:
        sources = self.sources
        in_force = self._in_force()[sources]
        self.offsets = self.offsets[sources]
        for k, knob in enumerate(self.knobs):
            draws = uniform(
                3 * len(sources), seed=self.scene.seed, window=window.index, purpose="explore", names=[knob.name]
            ).reshape(3, -1)
            low, high = min(self.ladders[k]) + self.centres[k], max(self.ladders[k]) + self.centres[k]
            for member, source in enumerate(sources):
                if source != member and draws[0, member] < self.population.resample:
                    self.offsets[member, k] = low + draws[1, member] * (high - low)
                elif source != member:
                    step = self.population.step * (1.0 if draws[2, member] < 0.5 else -1.0)
                    self.offsets[member, k] = in_force[member, k] + step
        self._enter_line(window.start, sources)

    def _enter_line(self, start: int, sources: list[int]) -> None:
        """A window opens at these offsets, as far as bounds allow.

        A base that its schedule moves away from a bound gives the members back what they had.
        """
        offsets = self.offsets.copy()
        for k, knob in enumerate(self.knobs):
            down, up = knob.spec.space.room(knob.base(start), knob.spec.bounds)
            offsets[:, k] = np.clip(offsets[:, k], -down, up)
        self.opened.append((start, sources, offsets.tolist(), [knob.shift for knob in self.knobs]))

    def after_update(self, window: Window, step: int) -> None:
        self._stop = step + 1

    def copied(self, sources: Sequence[int]) -> None:
        self.sources = list(sources)

    def best_schedule(self) -> dict[str, list[float]]:
        pieces: list[list[list[float]]] = []
        member, stop = self.sources[0], self._stop
        for start, sources, offsets, shifts in reversed(self.opened):
            pieces.append(
                [
                    _values(knob, range(start, stop), member, column, shift)
                    for knob, column, shift in zip(self.knobs, np.array(offsets).T, shifts, strict=True)
                ]
            )
            member, stop = sources[member], start
        return {
            knob.name: [value for piece in reversed(pieces) for value in piece[k]] for k, knob in enumerate(self.knobs)
        }

    def opened_from_first(self) -> None:
        start, sources, offsets, shifts = self.opened.pop()
        self.opened.append((start, sources[:1] * len(sources), offsets, shifts))

    def state_dict(self) -> dict[str, Any]:
        own = {"offsets": self.offsets.tolist(), "seen": self._seen, "stop": self._stop}
        return {**super().state_dict(), **own, "opened": [list(entry) for entry in self.opened]}

    def load_state_dict(self, state: dict[str, Any], window: Window | None) -> None:
        super().load_state_dict(state, window)
        self.sources = self._everyone()
        self.opened = [(int(start), sources, offsets, shifts) for start, sources, offsets, shifts in state["opened"]]
        if len(state["offsets"]) == len(self.offsets):
            self.offsets = np.array(state["offsets"])
            self._seen, self._stop = int(state["seen"]), int(state["stop"])
        else:
            # All take up member 0's opening of the window, and begin with the spread's levels.
            start, sources, _, _ = self.opened.pop()
            self.offsets, self._stop = self._levels(), start
            self._enter_line(start, sources[:1] * len(self.offsets))
        self._place_all()


def _place(knob: BoundKnob, offsets: NDArray[np.float64]) -> None:
    """Put the members at [N] offsets."""
    centre = float(offsets.mean())
    knob.spread(offsets - centre, centre)


def _values(knob: BoundKnob, steps: range, member: int, offsets: NDArray[np.float64], shift: float) -> list[float]:
    """A member's values at some steps, when the members were at [N] offsets from a base that had this shift."""
    held = knob.shift, knob.levels, knob.centre
    knob.shift = shift
    _place(knob, offsets)
    values = [knob.values(step, [member])[0] for step in steps]
    knob.shift = held[0]
    knob.spread(*held[1:])
    return values
