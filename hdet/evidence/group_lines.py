"""Evidence on many learning rates at the price of one: a common line, and what one gradient says of each group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hdet.controllers import Controller, Estimate, Pooled
from hdet.evidence.collector import Collector, Evidence
from hdet.evidence.line import Line, LineCollector, moved_by
from hdet.evidence.parts.group_slopes import GroupSlopes
from hdet.evidence.scene import Harvest, Scene
from hdet.hparams.bound_knob import BoundKnob
from hdet.hparams.knob import Knob
from hdet.hparams.space import Log, Relative, Space
from hdet.spec import register


@register
class GroupLines(Evidence):
    """The learning rates of several parameter groups: what all have in common, and where each stands among them.

    In common: `Line` along the whole window's update, all groups together, as for one rate.

    Each among the others (`Estimate.relative`): at window-averaged weights, the probe's slope along the group's own
    part of the update is b_k = <g, Ubar_k>, with one gradient g for all groups; at the weights the window opened at it
    is a_k = <g_0, Ubar_k>, what the part gained to first order. Where a rate is far too low the loss still falls as
    steeply as it did, b_k / a_k = 1; where it is right or too high, b_k / a_k is about 0. So groups are compared by
    that share. With A and B the sums of a and b over the groups,

        slope_k = (b_k - B a_k / A) / |A|,     curvature_k = |a_k| / |A|

    in units of the window's whole gain |A|, so that early windows, which gain most, do not outweigh later ones.
    Sub-batches give the standard error. A group whose update gained nothing, or a window that gained nothing, teaches
    nothing. While the common line looks ahead (`Line.preview`), nothing is read of single groups.

    The price is that of `Line` and two forward and backward passes of the probe, whatever the number of groups. Give
    the probe its sub-batches one by one: a loss that returns several at once is differentiated once for each.

    Args:
        line: how the common line is read.
    """

    sees: ClassVar[frozenset[str]] = frozenset({"update"})
    looks_ahead: ClassVar[bool] = True
    averages: ClassVar[bool] = True
    needs_probe: ClassVar[bool] = True
    spaces: ClassVar[tuple[type[Space], ...]] = (Log, Relative)

    line: Line = Line()

    @property
    def width(self) -> float:
        """How far the common line reaches, in coordinate units."""
        return self.line.width

    def collect(self, scene: Scene, knobs: Sequence[BoundKnob]) -> GroupLinesCollector:
        return GroupLinesCollector(self, scene, knobs)

    def default_controller(self, knob: Knob) -> Controller:
        return Pooled()


class GroupLinesCollector(Collector):
    """Reads the common line, and the probe's gradient at both ends of the averaged update."""

    def __init__(self, spec: GroupLines, scene: Scene, knobs: Sequence[BoundKnob]) -> None:
        super().__init__(scene, knobs)
        self.spec = spec
        self.common = LineCollector(spec.line, scene, knobs, together=True)

    def close(self, harvest: Harvest) -> dict[str, Estimate]:
        shared = self.common.close(harvest)[self.knobs[0].name]
        relative = [Estimate.nothing()] * len(self.knobs)
        if shared.testable and not shared.offset:
            relative = self._relative(harvest)
        return {knob.name: replace(shared, relative=own) for knob, own in zip(self.knobs, relative, strict=True)}

    def _relative(self, harvest: Harvest) -> list[Estimate]:
        scene = self.scene
        flags = zip(*(moved_by(knob, scene) for knob in self.knobs), strict=True)
        groups = [next((k for k, moves in enumerate(own) if moves), -1) for own in flags]
        start, averaged = scene.origin(), scene.averaged(harvest.valid, self.spec.line.stride)
        slopes = GroupSlopes(scene, harvest, groups, start, averaged)
        return among_the_others(slopes.mean(start), slopes.by_sub_batch(averaged))


def among_the_others(gains: NDArray[np.float64], slopes: NDArray[np.float64]) -> list[Estimate]:
    """Each group's estimate relative to what all groups share.

    Args:
        gains: [K] slopes along each group's update where the window opened, below 0 where the loss fell.
        slopes: [J, K] slopes of each sub-batch at the update's end, J >= 2.

    >>> [round(one.slope, 3) for one in among_the_others(np.array([-3.0, -1.0]), np.array([[0.0, -1.0], [0.0, -1.0]]))]
    [0.188, -0.188]
    """
    whole = float(gains.sum())
    if not (np.isfinite(gains).all() and np.isfinite(slopes).all() and whole < 0.0):
        return [Estimate.nothing()] * len(gains)
    shares = gains / whole
    relative = (slopes - slopes.sum(axis=1, keepdims=True) * shares) / abs(whole)
    errors = relative.std(axis=0, ddof=1) / np.sqrt(len(relative))
    return [
        Estimate(slope=float(column.mean()), stderr=float(error), curvature=float(share), slopes=tuple(column.tolist()))
        if share > 0.0
        else Estimate.nothing()
        for column, error, share in zip(relative.T, errors, shares, strict=True)
    ]
