"""The probe along a direction, for evidence that knows which way a knob moves the weights; how it knows is its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from hdet.controllers import Estimate
from hdet.evidence.collector import Collector, Evidence
from hdet.evidence.parts.batch_statistics import Statistics
from hdet.evidence.parts.line_fit import Points, along
from hdet.evidence.parts.losses_at import Write, losses_at
from hdet.evidence.scene import Harvest, Scene
from hdet.hparams.bound_knob import BoundKnob
from hdet.replicas import tensors
from hdet.replicas.tensors import Portion


@dataclass(frozen=True)
class Block:
    """Weights that a knob moves, of one dtype and device, one after another in one tensor.

    Attributes:
        places: which of a part of the weights they are.
        centre: [n] their values at the centre.
        direction: [n] D, in memory of its own.
    """

    places: Sequence[int]
    centre: Tensor
    direction: Tensor


Direction = Callable[[Portion, Sequence[Tensor]], Sequence[Block]]
"""D of a part of the weights, by the centre's values there, but for weights that the knob does not move."""


class Directional(Evidence):
    """The probe at centre + x D, D = d weights / d coordinate of a knob; what centre and D are, a member says.

    x is `width` times each of `points`, drawn in until |x D| is at most `reach` of the norm of the weights it moves.
    A D of zero teaches nothing, which is not the same as a slope that is known to be zero.
    """

    sees: ClassVar[frozenset[str]] = frozenset({"update"})
    needs_probe: ClassVar[bool] = True

    width: float = Field(gt=0)
    points: Points = (-1.0, 1.0)
    reach: float = Field(default=0.1, gt=0, le=1)


class DirectionalCollector(Collector):
    """Evaluates the probe along each knob's direction at a window's end.

    Attributes:
        keeps_weights: whether the centre is a copy of the first model's weights as they are.
    """

    keeps_weights = False

    def __init__(self, spec: Directional, scene: Scene, knobs: Sequence[BoundKnob]) -> None:
        super().__init__(scene, knobs)
        self.spec = spec

    def centre(self, harvest: Harvest) -> list[Tensor]:
        """The weights about which the probe is read, in the order of `Scene.moving`."""
        raise NotImplementedError

    def statistics(self, harvest: Harvest, centre: Sequence[Tensor]) -> Statistics | None:
        """Of BatchNorm layers at a centre that is not the weights as they are; None for those of these."""
        return None

    def direction(self, k: int, harvest: Harvest) -> Direction:
        """D of the knob `self.knobs[k]`."""
        raise NotImplementedError

    def norms(self, weights: Tensor, direction: Tensor) -> tuple[float, float]:
        """Of the weights that D moves, and of D, from those of each block."""
        return float(torch.linalg.vector_norm(weights)), float(torch.linalg.vector_norm(direction))

    def close(self, harvest: Harvest) -> dict[str, Estimate]:
        window = harvest.window
        found = {knob.name: Estimate.nothing() for knob in self.knobs}
        listening = (knob.controller.listens(window.stop, window.total_steps) for knob in self.knobs)
        heard = [k for k, listens in enumerate(listening) if listens]
        if not heard:
            return found
        centre = self.centre(harvest)
        keeps_weights, statistics = self.keeps_weights, self.statistics(harvest, centre)
        if centre is self.scene.moving.values():  # an average to which nothing was added; points are written over these
            centre, keeps_weights = tensors.clones(centre), True
        points: list[Any] = []
        offsets: list[list[float]] = []
        stretches: list[float] = []
        for k in heard:
            direction = self.direction(k, harvest)
            stretch = self._stretch(centre, direction)
            width = self._width(stretch)
            stretches.append(stretch)
            offsets.append([width * point for point in self.spec.points])
            points += [partial(self._moved, centre, direction, x) for x in offsets[-1]]
        kept = centre if keeps_weights else None
        with self.scene.at_base():
            losses = losses_at(self.scene, harvest, points, kept, independent=True, statistics=statistics)
        lines = losses.reshape(len(offsets), len(self.spec.points), -1)
        for k, x, line, stretch in zip(heard, offsets, lines, stretches, strict=True):
            if any(x):
                told = along(x, line)
                found[self.knobs[k].name] = replace(
                    told, level=float(line.mean()), span=max(map(abs, x)), stretch=stretch
                )
        return found

    def _width(self, stretch: float) -> float:
        """The width, or as much of it as moves the weights by no more than `reach` of their norm; 0 without any D."""
        furthest = max(map(abs, self.spec.points)) * stretch
        return min(self.spec.width, self.spec.reach / furthest) if furthest > 0.0 else 0.0

    @torch.no_grad()
    def _stretch(self, centre: Sequence[Tensor], direction: Direction) -> float:
        """|D| over the norm of the weights that it moves; 0 without any, infinite where they are all zero."""
        blocks = [
            (torch.linalg.vector_norm(block.centre).double(), torch.linalg.vector_norm(block.direction).double())
            for part, own in self._parts(centre)
            for block in direction(part, own)
        ]
        # A rank that holds nothing of what D moves takes part all the same: norms may be a collective.
        device = next((own.device for own in self.scene.moving.values()), None)
        nothing = torch.zeros((), dtype=torch.float64, device=device)
        blocks.append((nothing, nothing))
        length, change = self.norms(*(torch.stack(own) for own in zip(*blocks, strict=True)))
        if change == 0.0:
            return 0.0
        return change / length if length > 0.0 else math.inf

    def _moved(self, centre: Sequence[Tensor], direction: Direction, factor: float) -> Write:
        """The point centre + factor D."""
        return partial(self._write, centre, direction, factor)

    @torch.no_grad()
    def _write(self, centre: Sequence[Tensor], direction: Direction, factor: float, live: Sequence[Tensor]) -> None:
        for part, own in self._parts(centre):
            for block in direction(part, own) if factor else ():
                moved = block.direction.mul_(factor).add_(block.centre)
                like = [own[place] for place in block.places]
                for place, value in zip(block.places, tensors.parted(moved, like), strict=True):
                    own[place] = value
            tensors.copy_(part.of(live), own)

    def _parts(self, centre: Sequence[Tensor]) -> Iterator[tuple[Portion, list[Tensor]]]:
        """The centre a part at a time, beside the weights."""
        live = self.scene.moving.values()
        beside = all(c.device == own.device for c, own in zip(centre, live, strict=True))
        for part in tensors.portions(live, centre):
            own = part.of(centre)
            yield part, own if beside else [c.to(one.device) for c, one in zip(own, part.of(live), strict=True)]
