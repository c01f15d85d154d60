"""Evidence on the merge's own optimizer: the probe at the points that its step would lead to at other settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from pydantic import Field

from hdet.controllers import Estimate
from hdet.errors import ConfigError
from hdet.evidence.collector import Collector, Evidence
from hdet.evidence.parts.line_fit import Points, along
from hdet.evidence.parts.losses_at import Point, losses_at
from hdet.evidence.scene import Harvest, OuterStep, Scene
from hdet.hparams.binding import GroupBinding
from hdet.hparams.bound_knob import BoundKnob
from hdet.spec import register

NEXT = 0.01
"""Of the width: a bound as near to a point is none of its own."""


@register
class OuterLine(Evidence):
    """The probe after the outer step, as it would be at other values of a knob: nothing diverges.

        y_j(x) = L_j(theta_a + step(theta_a - theta_m; value e^x)),   x = width * points

    At a window's end the replicas become theta_m, and the optimizer of `hdet.merges.Outer` is about to step from the
    window's opening theta_a. The same step is tried at each x, with the same displacement and the same outer state, and
    the probe evaluated there. So it is exact for any optimizer and setting: each point is where the run would go on
    from. (e^x is the value moved by x in a `Log` space; other spaces move it in their own way.)

    It looks no further than this one step. Of momentum it sees what this step carries over, not what later ones will.
    Where the loss right after the step is no guide to the loss many windows on, it is no guide either.

    Costs one probe a point and knob, and for a moment a copy of the outer state.

    Args:
        width: how far the points reach, in coordinate units.
        points: where the step is tried, in units of `width`; three or more give a curvature too.
    """

    sees: ClassVar[frozenset[str]] = frozenset({"merge"})
    needs_probe: ClassVar[bool] = True

    width: float = Field(default=0.3, gt=0, le=3)
    points: Points = (-1.0, 1.0)

    def collect(self, scene: Scene, knobs: Sequence[BoundKnob]) -> OuterLineCollector:
        return OuterLineCollector(self, scene, knobs)


class OuterLineCollector(Collector):
    """Evaluates the probe where the coming outer step would lead."""

    def __init__(self, spec: OuterLine, scene: Scene, knobs: Sequence[BoundKnob]) -> None:
        super().__init__(scene, knobs)
        self.spec = spec
        self.keys = [_key(knob) for knob in knobs]

    def close(self, harvest: Harvest) -> dict[str, Estimate]:
        """Nothing yet: where the step begins is known once the replicas are one."""
        return {knob.name: Estimate.nothing() for knob in self.knobs}

    def close_merged(self, harvest: Harvest, step: OuterStep) -> dict[str, Estimate]:
        window = harvest.window
        tried: dict[str, list[float]] = {}
        points: list[Point] = []
        for knob, key in zip(self.knobs, self.keys, strict=True):
            offsets = self._offsets(knob, window.stop)
            if knob.controller.listens(window.stop, window.total_steps) and len(offsets) > 1:
                tried[knob.name] = offsets
                points += [partial(step.at, {key: knob.displaced(window.stop, x)}) for x in offsets]
        if not points:
            return {}
        with self.scene.at_base():
            losses = losses_at(self.scene, harvest, points)
        found: dict[str, Estimate] = {}
        for name, offsets in tried.items():
            line, losses = losses[: len(offsets)], losses[len(offsets) :]
            found[name] = replace(along(offsets, line), level=float(line.mean()), span=max(map(abs, offsets)))
        return found

    def _offsets(self, knob: BoundKnob, step: int) -> list[float]:
        """Where the points lie in coordinate units, none beyond the bounds, nor next to another that a bound cut back.

        Between such two losses differ by rounding, and a parabola through both would follow that.
        """
        down, up = knob.spec.space.room(knob.base(step), knob.spec.bounds)
        wanted = [self.spec.width * point for point in self.spec.points]
        found = [own for own in wanted if -down <= own <= up]
        ends = [-down] * (min(wanted) < -down) + [up] * (max(wanted) > up)
        found += [end for end in ends if all(abs(end - own) > NEXT * self.spec.width for own in found)]
        return sorted(set(found))


def _key(knob: BoundKnob) -> str:
    binding = knob.bindings[0]
    if not isinstance(binding, GroupBinding):
        raise ConfigError(
            f"{knob.name}: OuterLine tries settings of the merge's optimizer; declare hdet.merges.OuterLearningRate or "
            f"OuterMomentum, or a knob that binds to an entry of its group"
        )
    return binding.key
