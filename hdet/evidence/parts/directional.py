"""The probe along a direction, for evidence that knows which way a knob moves the weights; how it knows is its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from pydantic import Field, field_validator
from torch import Tensor

from hdet.controllers import Estimate
from hdet.evidence.collector import Collector, Evidence
from hdet.evidence.parts.line_fit import along
from hdet.evidence.parts.losses_at import losses_at
from hdet.evidence.scene import Harvest, Scene
from hdet.hparams.bound import BoundKnob


class Directional(Evidence):
    """The probe at centre + x D, D = d weights / d coordinate of a knob; what centre and D are, a member says.

    x is `width` times each of `points`, drawn in until |x D| is at most `reach` of the norm of the weights it moves.
    A D of zero teaches nothing, which is not the same as a slope that is known to be zero.
    """

    sees: ClassVar[frozenset[str]] = frozenset({"update"})
    needs_probe: ClassVar[bool] = True

    width: float = Field(gt=0)
    points: tuple[float, ...] = (-1.0, 1.0)
    reach: float = Field(default=0.1, gt=0, le=1)

    @field_validator("points")
    @classmethod
    def _distinct(cls, points: tuple[float, ...]) -> tuple[float, ...]:
        if len(set(points)) < 2:
            raise ValueError(f"a slope needs at least 2 distinct points, got {points}")
        return points


class DirectionalCollector(Collector):
    """Evaluates the probe along each knob's direction at a window's end."""

    def __init__(self, spec: Directional, scene: Scene, knobs: Sequence[BoundKnob]) -> None:
        super().__init__(scene, knobs)
        self.spec = spec

    def centre(self, harvest: Harvest) -> list[Tensor]:
        """The weights about which the probe is read, in the order of `hdet.replicas.tensors.parameters`."""
        raise NotImplementedError

    def direction(self, k: int, centre: Sequence[Tensor], harvest: Harvest) -> list[Tensor | None]:
        """D of the knob `self.knobs[k]`, one for each of `centre`; `None` for weights that the knob does not move."""
        raise NotImplementedError

    def norms(self, weights: list[Tensor], direction: list[Tensor]) -> tuple[float, float]:
        """Of the weights that D moves, and of D."""
        return float(torch.linalg.vector_norm(lengths(weights))), float(torch.linalg.vector_norm(lengths(direction)))

    def close(self, harvest: Harvest) -> dict[str, Estimate]:
        window = harvest.window
        found = {knob.name: Estimate.nothing() for knob in self.knobs}
        listening = (knob.controller.listens(window.stop, window.total_steps) for knob in self.knobs)
        heard = [k for k, listens in enumerate(listening) if listens]
        if not heard:
            return found
        centre = self.centre(harvest)
        points: list[Any] = []
        offsets: list[list[float]] = []
        for k in heard:
            direction = self.direction(k, centre, harvest)
            width = self._width(centre, direction)
            offsets.append([width * point for point in self.spec.points])
            points += [partial(_moved, centre, direction, x) for x in offsets[-1]]
        with self.scene.at_base():
            losses = losses_at(self.scene.replicas, self.scene.probe, harvest, points)
        lines = losses.reshape(len(offsets), len(self.spec.points), -1)
        for k, x, line in zip(heard, offsets, lines, strict=True):
            if any(x):
                found[self.knobs[k].name] = replace(along(x, line), level=float(line.mean()), span=max(map(abs, x)))
        return found

    def _width(self, centre: Sequence[Tensor], direction: Sequence[Tensor | None]) -> float:
        """The width, or as much of it as moves the weights by no more than `reach` of their norm; 0 without any D."""
        moved = [(c, d) for c, d in zip(centre, direction, strict=True) if d is not None]
        if not moved:
            return 0.0
        weights, change = self.norms([c for c, _ in moved], [d for _, d in moved])
        furthest = max(map(abs, self.spec.points)) * change
        return min(self.spec.width, self.spec.reach * weights / furthest) if furthest > 0.0 else 0.0


def lengths(tensors: list[Tensor]) -> Tensor:
    """The norm of each tensor, in float64."""
    return torch.stack(torch._foreach_norm(tensors)).double()


@torch.no_grad()
def _moved(centre: Sequence[Tensor], direction: Sequence[Tensor | None], factor: float) -> list[Tensor]:
    return [c if d is None or factor == 0.0 else c + d * factor for c, d in zip(centre, direction, strict=True)]
