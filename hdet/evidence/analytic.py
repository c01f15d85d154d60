"""Analytic evidence: the direction a knob of the update moves the weights in, known by its formula."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any, ClassVar

import torch
from pydantic import Field, field_validator
from torch import Tensor

from hdet.controllers import Estimate
from hdet.errors import ConfigError
from hdet.evidence.collector import Collector, Harvest, Scene, Window
from hdet.evidence.fit import along
from hdet.evidence.points import losses_at
from hdet.evidence.preconditioner import decoupled, preconditioner
from hdet.hparams.binding import GroupBinding
from hdet.hparams.bound import BoundKnob
from hdet.hparams.evidence import Evidence
from hdet.hparams.space import Log, Relative, Space
from hdet.spec import register


@register
class Analytic(Evidence):
    """The probe along D = d theta / d log(decay), which weight decay's own formula gives; nothing diverges.

    Over a window, decay lambda has pulled the weights by D = -sum_t lr_t lambda_t theta_t (decoupled), or by
    -sum_t P_t lambda_t theta_t through the preconditioner P (L2). Read at window-averaged weights, where the
    noise of single steps does not count, and with their mean standing for theta_t: it is already there for
    `Line`. L(theta + x D) at a few x then gives the slope.

    D says what decay did, and nothing of how gradients answered. Where decay is strong or windows are long, weights
    decay many times over, and D would point past the origin; so x is kept so small that |x D| stays within
    `reach` of the weights it moves.

    Args:
        width: how far the points reach, in coordinate units, if `reach` allows.
        points: where the probe is evaluated, in units of `width`; three or more give a curvature too.
        reach: largest |x D| over the norm of the weights that decay.
        stride: of the average, take every stride-th step's weights.
    """

    sees: ClassVar[frozenset[str]] = frozenset({"update"})
    needs_probe: ClassVar[bool] = True
    spaces: ClassVar[tuple[type[Space], ...]] = (Log, Relative)

    width: float = Field(default=1.0, gt=0, le=10)
    points: tuple[float, ...] = (-1.0, 1.0)
    reach: float = Field(default=0.1, gt=0, le=1)
    stride: int = Field(default=1, ge=1)

    @field_validator("points")
    @classmethod
    def _distinct(cls, points: tuple[float, ...]) -> tuple[float, ...]:
        if len(set(points)) < 2:
            raise ValueError(f"a slope needs at least 2 distinct points, got {points}")
        return points

    def collect(self, scene: Scene, knobs: Sequence[BoundKnob]) -> AnalyticCollector:
        return AnalyticCollector(self, scene, knobs)


class AnalyticCollector(Collector):
    """Sums what decay multiplied the weights by over the window, and evaluates the probe along it."""

    def __init__(self, spec: Analytic, scene: Scene, knobs: Sequence[BoundKnob]) -> None:
        super().__init__(scene, knobs)
        self.spec = spec
        scene.follow(spec.stride)
        self.bindings = [_decay(knob) for knob in knobs]
        self.pulls = self._none()

    def _none(self) -> list[list[float | Tensor]]:
        return [[0.0] * len(binding.indices) for binding in self.bindings]

    def open(self, window: Window) -> None:
        self.pulls = self._none()

    def after_update(self, window: Window, step: int) -> None:
        for knob, pulls, binding in zip(self.knobs, self.pulls, self.bindings, strict=True):
            base = knob.base(step)
            for place, (index, ratio) in enumerate(zip(binding.indices, binding.ratios, strict=True)):
                # A rate that is a tensor stays on its device.
                pulls[place] = pulls[place] + base * ratio * binding.optimizer.param_groups[index]["lr"]

    def close(self, harvest: Harvest) -> dict[str, Estimate]:
        window = harvest.window
        heard = [knob.controller.listens(window.stop, window.total_steps) for knob in self.knobs]
        found = {knob.name: Estimate.nothing() for knob in self.knobs}
        if not any(heard):
            return found
        centre = self.scene.averaged(harvest.valid, self.spec.stride)
        points: list[Any] = []
        offsets: list[list[float]] = []
        for binding, pulls in zip(compress(self.bindings, heard), compress(self.pulls, heard), strict=True):
            direction = self._direction(binding, [float(pull) for pull in pulls], centre)
            width = self._width(centre, direction)
            offsets.append([width * point for point in self.spec.points])
            points += [partial(_moved, centre, direction, x) for x in offsets[-1]]
        with self.scene.at_base():
            losses = losses_at(self.scene.replicas, self.scene.probe, harvest, points)
        lines = losses.reshape(len(offsets), len(self.spec.points), -1)
        for knob, x, line in zip(compress(self.knobs, heard), offsets, lines, strict=True):
            found[knob.name] = replace(along(x, line), level=float(line.mean()))
        return found

    def _width(self, centre: Sequence[Tensor], direction: Sequence[Tensor | None]) -> float:
        """The width, or as much of it as moves the decaying weights by no more than `reach` of their norm."""
        moved = [(c, d) for c, d in zip(centre, direction, strict=True) if d is not None]
        if not moved:
            return self.spec.width
        squares = [_square([c for c, _ in moved]), _square([d for _, d in moved])]
        # Of sharded weights each process sees a part; a replica's number is the mean over its parts.
        replicas = self.scene.replicas
        weights, change = replicas.gather(torch.stack(squares).expand(len(replicas.local), -1))[0]
        furthest = max(map(abs, self.spec.points)) * math.sqrt(change)
        return (
            min(self.spec.width, self.spec.reach * math.sqrt(weights) / furthest) if furthest > 0 else self.spec.width
        )

    @torch.no_grad()
    def _direction(
        self, binding: GroupBinding, pulls: Sequence[float], centre: Sequence[Tensor]
    ) -> list[Tensor | None]:
        model = self.scene.replicas.hosts[0][0]
        place = {id(p): number for number, p in enumerate(q for q in model.parameters() if q.numel())}
        direction: list[Tensor | None] = [None] * len(place)
        for index, pull in zip(binding.indices, pulls, strict=True):
            group = binding.optimizer.param_groups[index]
            for parameter in group["params"]:
                number = place.get(id(parameter))
                if number is None or pull == 0.0 or not parameter.requires_grad:
                    continue
                if decoupled(binding.optimizer, group):
                    direction[number] = centre[number] * -pull
                    continue
                scale = preconditioner(binding.optimizer, group, parameter)
                lr = float(group["lr"])
                if scale is not None and lr > 0.0:
                    direction[number] = centre[number] * scale * (-pull / lr)
        return direction

    def state_dict(self) -> dict[str, Any]:
        return {"pulls": [[float(pull) for pull in pulls] for pulls in self.pulls]}

    def load_state_dict(self, state: dict[str, Any], window: Window | None) -> None:
        if window is not None:
            self.pulls = [list(pulls) for pulls in state["pulls"]]


def _square(tensors: list[Tensor]) -> Tensor:
    """The squared norm of all together, a 0-dim tensor."""
    return torch.stack(torch._foreach_norm(tensors)).double().square().sum()


@torch.no_grad()
def _moved(centre: Sequence[Tensor], direction: Sequence[Tensor | None], factor: float) -> list[Tensor]:
    return [c if d is None or factor == 0.0 else c + d * factor for c, d in zip(centre, direction, strict=True)]


def _decay(knob: BoundKnob) -> GroupBinding:
    binding = knob.bindings[0]
    if not isinstance(binding, GroupBinding) or binding.key != "weight_decay":
        raise ConfigError(
            f"{knob.name}: Analytic evidence knows the direction of weight decay only; use Line for learning rates, "
            f"Contrast for knobs of the forward pass, Divergent for others"
        )
    return binding
