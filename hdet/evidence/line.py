"""Line evidence: what another learning rate would have done, read off the window's own update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, field_validator
from torch import Tensor

from hdet.controllers import Calibrate, Controller, Estimate
from hdet.errors import ConfigError
from hdet.evidence.collector import Collector, Evidence
from hdet.evidence.parts.line_fit import along, bottom_in_value
from hdet.evidence.parts.losses_at import Point, Write, losses_at
from hdet.evidence.parts.step_size import empty_at_first, step_size
from hdet.evidence.scene import Harvest, Scene, Window
from hdet.hparams.binding import GroupBinding
from hdet.hparams.bound_knob import BoundKnob
from hdet.hparams.knob import Knob
from hdet.hparams.space import Log, Relative, Space
from hdet.replicas import tensors
from hdet.spec import register

STEEP = 3.0
"""The power of the rate that a loss grows by along a line from which the opening's is asked for."""


@register
class Line(Evidence):
    """The probe along the window's update U = theta_T - theta_0; for learning rates, in a `Log` space.

    L(theta_0 + e^x U) is, to first order, what a replica at learning rate lr e^x would report, on one trajectory,
    with no replica and no spread. It is read twice: at the last weights, and along Ubar = mean_t(theta_t) -
    theta_0, the window-averaged weights, which `Estimate.averaged` carries.

    While the schedule warms up and stands at a share s < `preview` of its peak, the first line is read where the
    rate will be once the share is `preview`: at x about log(preview / s), which `Estimate.offset` tells. So a peak
    that is far off shows in the first windows, before it does harm. There is no second line then.

    As long as it rises, `Estimate.step_size` tells how large the steps at its peak are beside the weights, and
    `Estimate.excess`, in the first window, whether these were drawn at random. Where the loss then grows by more than
    the cube of the rate, `Estimate.opening` tells what it was at the window's opening, by one evaluation more.

    Args:
        width: how far the points reach, in coordinate units.
        points: where the probe is evaluated, in units of `width`. The two ends, -x and x, 2 or 4 probes a window, tell
            the slope; the others, which tell the curvature, are evaluated only if the controller would use it
            (`Controller.wants_curvature`).
        stride: of the average, take every stride-th step's weights; by default as many as leave at least 128 in the
            window.
        read_average_above: t at the last weights above which the averaged weights are read; `None` always reads them.
        preview: share of the schedule's peak that is looked ahead to during the warm-up; 0 never looks ahead.
    """

    sees: ClassVar[frozenset[str]] = frozenset({"update"})
    looks_ahead: ClassVar[bool] = True
    averages: ClassVar[bool] = True
    needs_probe: ClassVar[bool] = True
    spaces: ClassVar[tuple[type[Space], ...]] = (Log, Relative)

    width: float = Field(default=0.3, gt=0, le=3)
    points: tuple[float, ...] = (-1.0, 0.0, 1.0)
    stride: int | None = Field(default=None, ge=1)
    read_average_above: float | None = 2.0
    preview: float = Field(default=0.25, ge=0, le=1)

    @field_validator("points")
    @classmethod
    def _distinct(cls, points: tuple[float, ...]) -> tuple[float, ...]:
        if len(set(points)) < 3:
            raise ValueError(f"a slope and a curvature need at least 3 distinct points, got {points}")
        if min(points) != -max(points):
            raise ValueError(f"the slope is told by the two ends, which must lie at -x and x, got {points}")
        return points

    def collect(self, scene: Scene, knobs: Sequence[BoundKnob]) -> LineCollector:
        return LineCollector(self, scene, knobs)

    def default_controller(self, knob: Knob) -> Controller:
        return Calibrate()


class LineCollector(Collector):
    """Follows the averaged weights, and evaluates the probe along both lines at a window's end.

    Args:
        together: whether one line is read for all knobs, as soon as one of them would use it; else one for each.
    """

    def __init__(self, spec: Line, scene: Scene, knobs: Sequence[BoundKnob], *, together: bool = False) -> None:
        super().__init__(scene, knobs)
        self.spec = spec
        self.together = [self.knobs] if together else [[knob] for knob in self.knobs]
        self.empty: list[int] = []
        scene.follow(spec.stride)
        for knob in knobs:
            moved_by(knob, scene)  # which refuses what is no learning rate

    def close(self, harvest: Harvest) -> dict[str, Estimate]:
        window, nothing = harvest.window, replace(Estimate.nothing(), averaged=Estimate.nothing())
        found = {knob.name: nothing for knob in self.knobs}
        told = (window.stop, window.total_steps)
        knobs = [own for own in self.together if any(knob.controller.listens(*told) for knob in own)]
        if not knobs:
            return found
        start = self.scene.origin()
        last = self.scene.weights(harvest.valid)
        kept = None if self.scene.apart else last
        ends, between = self._points()
        centres = [self._centre(own, window) for own in knobs]
        moves = [list(map(any, zip(*(moved_by(knob, self.scene) for knob in own), strict=True))) for own in knobs]

        def measure(lines: Sequence[Segment], chosen: Sequence[int], offsets: Sequence[float]) -> NDArray[np.float64]:
            points: list[Point] = [
                partial(line.at, math.exp(centres[k] + x))
                for k, line in zip(chosen, lines, strict=True)
                for x in offsets
            ]
            with self.scene.at_base():
                losses = losses_at(self.scene, harvest, points, kept, independent=True)
            return losses.reshape(len(chosen), len(offsets), -1)

        rising = [self._rises(own, window) for own in knobs]

        def read(end: Sequence[Tensor], chosen: Sequence[int], averaged: bool) -> dict[int, Estimate]:
            segments = {k: Segment(start, end, moves[k]) for k in chosen}
            lines = dict(zip(chosen, measure(list(segments.values()), chosen, ends), strict=True))
            told = {
                k: replace(along(ends, line), offset=centres[k], level=float(line.mean())) for k, line in lines.items()
            }
            curved = [
                k for k in chosen if any(one.controller.wants_curvature(told[k], averaged=averaged) for one in knobs[k])
            ]
            if curved:
                more = measure([segments[k] for k in curved], curved, between)
                for k, line in zip(curved, more, strict=True):
                    points, losses = [*ends, *between], np.concatenate([lines[k], line])
                    bottom = bottom_in_value(points, losses)
                    told[k] = replace(along(points, losses), offset=centres[k], level=told[k].level, bottom=bottom)
            steep = [k for k in chosen if rising[k] and not averaged and self._is_steep(lines[k])]
            if steep:
                for k, line in zip(steep, measure([segments[k] for k in steep], steep, [-math.inf]), strict=True):
                    told[k] = replace(told[k], opening=float(line.mean()))
            return told

        at_last = read(last, range(len(knobs)), averaged=False)
        # Averaged weights never ask for less where the last do not. Looking ahead is a matter of the last alone.
        threshold = self.spec.read_average_above
        doubted = [
            k for k, told in at_last.items() if (threshold is None or told.t_of_eight > threshold) and not centres[k]
        ]
        at_average = dict.fromkeys(range(len(knobs)), Estimate.nothing())
        if doubted:
            average = self.scene.averaged(harvest.valid, self.spec.stride)
            is_last = average is self.scene.moving.values()  # of which there is a copy
            at_average.update(read(last if is_last else average, doubted, averaged=True))
        if window.start == 0 and any(rising):
            self.empty = empty_at_first(self.scene, self.knobs)
        sizes = [
            step_size(self.scene, own, self.empty) if rises else None for own, rises in zip(knobs, rising, strict=True)
        ]
        norms = self.scene.excess if window.start == 0 and any(sizes) else None
        for k, own in enumerate(knobs):
            judged = replace(at_last[k], averaged=at_average[k], step_size=sizes[k], excess=norms)
            found.update(dict.fromkeys((knob.name for knob in own), judged))
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"empty": list(self.empty)}

    def load_state_dict(self, state: dict[str, Any], window: Window | None) -> None:
        self.empty = list(state.get("empty", []))  # states of older versions have none

    def _points(self) -> tuple[list[float], list[float]]:
        """The two ends in coordinate units, and what lies between."""
        x = sorted(self.spec.width * point for point in set(self.spec.points))
        return [x[0], x[-1]], x[1:-1]

    def _is_steep(self, line: NDArray[np.float64]) -> bool:
        """Whether the loss grows by more than the cube of the rate from one end to the other."""
        low, high = map(float, line.mean(axis=1))
        apart = 2 * self.spec.width * max(self.spec.points)
        return 0.0 < low < high and math.log(high) - math.log(low) > STEEP * apart

    @staticmethod
    def _rises(knobs: Sequence[BoundKnob], window: Window) -> bool:
        """Whether a schedule is still on its way up, to a peak that is known; by steps as long as a window, too."""
        known = [knob for knob in knobs if knob.schedule.total_steps is not None]
        return any(
            own.rises(window.start, window.stop) or (window.start == 0 and own.schedule(0) < own.peak) for own in known
        )

    def _centre(self, knobs: Sequence[BoundKnob], window: Window) -> float:
        """How far ahead of the base to look: 0 but in the early warm-up, which a knob that stays at 0 has not."""
        knob = next((one for one in knobs if one.peak > 0.0), knobs[0])
        first, last = knob.schedule(window.start), knob.schedule(window.stop - 1)
        share = (first + last) / 2 / knob.peak if knob.peak > 0.0 else 1.0
        if not knob.rises(window.start, window.stop - 1) or not 0.0 < share < self.spec.preview:
            return 0.0
        return math.log(self.spec.preview / share)


def moved_by(knob: BoundKnob, scene: Scene) -> list[bool]:
    """Which of the weights this learning rate moves."""
    binding = knob.bindings[0]
    if not isinstance(binding, GroupBinding) or binding.key != "lr":
        raise ConfigError(
            f"{knob.name}: Line evidence reads learning rates off the update; use Analytic for decay, Recursion for "
            f"momentum and betas, Contrast for knobs of the forward pass"
        )
    own = {id(parameter) for parameter in binding.parameters()}
    return [id(parameter) in own for parameter in scene.moving.parameters[0]]


class Segment:
    """start + x (end - start), written over a model's weights for any x.

    Nothing of the size of the weights is allocated: where they have to be converted, a part at a time is.

    Args:
        start, end: weights in the model's order, on any device and of any dtype; the line is worked out in those
            of `start`. `end` may be the model's own weights, of which a copy is then made.
        moves: which of them lie on the line. The others are at `end` for every x.
    """

    def __init__(self, start: Sequence[Tensor], end: Sequence[Tensor], moves: Sequence[bool]) -> None:
        self._moves = moves
        self._stays = [not moving for moving in moves]
        self._start = list(compress(start, moves))
        self._end = list(compress(end, moves))
        self._rest = list(compress(end, self._stays))
        self._live: Sequence[Tensor] | None = None
        self._in_place = False

    def at(self, x: float) -> Write:
        """The point at x: 0 is the start and 1 the end."""
        return partial(self._write, x)

    @torch.no_grad()
    def _write(self, x: float, live: Sequence[Tensor]) -> None:
        moving = list(compress(live, self._moves))
        if live is not self._live:  # the same list as long as the weights stay in their memory
            self._live = live
            ends = list(zip(moving, self._start, self._end, strict=True))
            self._in_place = all(own.dtype == a.dtype == b.dtype and own.device == b.device for own, a, b in ends)
            if any(own.data_ptr() == b.data_ptr() for own, _, b in ends):
                self._end = tensors.clones(self._end)  # before it is written over
        if self._in_place:
            tensors.copy_(moving, self._start)
            if moving:
                torch._foreach_lerp_(moving, self._end, x)
        else:
            for part in tensors.portions(moving, self._start, self._end):
                here = part.of(moving)
                pairs = list(zip(here, part.of(self._start), part.of(self._end), strict=True))
                first = [a.to(own.device) for own, a, _ in pairs]
                last = [b.to(own.device, a.dtype) for own, a, b in pairs]
                tensors.copy_(here, torch._foreach_lerp(first, last, x))
        tensors.copy_(list(compress(live, self._stays)), self._rest)
