"""Evidence on many learning rates at the price of one: a common line, and what one gradient says of each group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet.controllers import Controller, Estimate, Pooled
from hdet.evidence.collector import Collector, Evidence
from hdet.evidence.line import Line, LineCollector, moved_by
from hdet.evidence.parts.batch_statistics import Statistics
from hdet.evidence.parts.losses_at import statistics_of_average
from hdet.evidence.scene import Harvest, Scene
from hdet.hparams.bound_knob import BoundKnob
from hdet.hparams.knob import Knob
from hdet.hparams.space import Log, Relative, Space
from hdet.replicas import gradients, tensors
from hdet.signals.probe import differentiable, flat
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

    The price is that of `Line` and two forward and backward passes of the probe, whatever the number of groups.

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
        stride = self.spec.line.stride
        start, averaged = scene.origin(), scene.averaged(harvest.valid, stride)
        statistics = statistics_of_average(scene, harvest, stride, averaged)
        slopes = GroupSlopes(scene, harvest, groups, start, averaged)
        return among_the_others(slopes.mean(start), slopes.by_sub_batch(averaged, statistics))


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


class GroupSlopes:
    """Slopes <g, U_k>: U_k is an update where the parameters of group k are, and 0 elsewhere.

    The groups share no parameter, so the products of one gradient g with the whole update, parameter by parameter, give
    the slopes of all K groups: a hundred cost what one does. Weights are those of `Scene.moving`, in its order.

    Args:
        scene, harvest: what is judged.
        groups: for each of the weights its group 0 <= k < K, or -1 for none.
        start, end: weights between which the update lies.
    """

    def __init__(
        self, scene: Scene, harvest: Harvest, groups: Sequence[int], start: Sequence[Tensor], end: Sequence[Tensor]
    ) -> None:
        self.scene = scene
        self.harvest = harvest
        self.count = max(groups) + 1
        weights = scene.moving.parameters[0]
        place = {id(parameter): number for number, parameter in enumerate(weights) if groups[number] >= 0}
        trained = tensors.trained(scene.replicas.hosts[0][0])
        self._groups = groups
        # By their number among the gradients: those that belong to a group.
        self._places = {n: place[id(parameter)] for n, parameter in enumerate(trained) if id(parameter) in place}
        # Of a sharded parameter a rank has a part of the product, and a replica's number is the mean over its ranks.
        self._pieces = {number: float(tensors.pieces(trained[number])) for number in self._places}
        live = scene.moving.values()
        self._difference: Callable[[int], Tensor] = lambda place: end[place] - start[place]
        if end is live or any(
            held.device != own.device for ends in (start, end) for held, own in zip(ends, live, strict=True)
        ):
            # What is about to be written over, or to come from the host again and again, is worked out now.
            with torch.no_grad():
                update = [b.to(own.device) - a.to(own.device) for a, b, own in zip(start, end, live, strict=True)]
            self._difference = update.__getitem__

    def mean(self, weights: Sequence[Tensor]) -> NDArray[np.float64]:
        """[K] slopes of the mean probe loss at some weights. One forward and one backward pass of the probe."""
        rows = self._rows(weights, lambda loss: loss.sum().reshape(1))
        return self._agreed(torch.stack([row for row, _ in rows]).sum(dim=0) / sum(count for _, count in rows))

    def by_sub_batch(self, weights: Sequence[Tensor], statistics: Statistics | None = None) -> NDArray[np.float64]:
        """[J, K] slopes of each sub-batch's loss at some weights, with other statistics of BatchNorm layers or those.

        Also one forward and one backward pass of the probe, if its loss gives one number for each of J batches. Where
        it gives all J at once, each is differentiated through the whole batch, at J times the price.
        """
        return self._agreed(torch.stack([row for row, _ in self._rows(weights, lambda loss: loss, statistics)]))

    def _rows(
        self, weights: Sequence[Tensor], of: Callable[[Tensor], Tensor], statistics: Statistics | None = None
    ) -> list[tuple[Tensor, int]]:
        """[K] slopes of each loss that `of` makes of a batch's, and how many losses the batch gave."""
        rows: list[tuple[Tensor, int]] = []

        def begin() -> gradients.Take:
            row = torch.zeros(self.count, dtype=torch.float64, device=device)
            rows.append((row, count))
            return partial(self._add_product, row)

        model = self.scene.replicas.hosts[0][0]
        with self._at(weights, statistics):
            for loss in self._losses():
                count, device = loss.numel(), loss.device
                gradients.handed_over(model, of(loss), begin)
        return rows

    @contextmanager
    def _at(self, weights: Sequence[Tensor], statistics: Statistics | None) -> Iterator[None]:
        """The first model at some weights, every knob at its base, ready to be differentiated."""
        scene = self.scene
        scene.replicas.mean_buffers(self.harvest.valid.tolist())
        model, optimizer = scene.replicas.hosts[0]
        with (
            scene.at_base(),
            tensors.substituted(scene.moving.values(), weights),
            scene.probe.evaluated(model, self.harvest.window.index, optimizer),
            torch.enable_grad(),
        ):
            if statistics is not None:
                statistics.put(model)  # which the probe puts back
            yield

    def _losses(self) -> Iterator[Tensor]:
        """What each of the probe's batches gives; asked for when the one before has been differentiated."""
        probe, model = self.scene.probe, self.scene.replicas.hosts[0][0]
        for batch in probe.draw(self.harvest.window.index):
            yield differentiable(flat(probe.loss(model, batch)))

    @torch.no_grad()
    def _add_product(self, row: Tensor, number: int, gradient: Tensor) -> None:
        """Add one parameter's part of <g, U> to its group's slope, in float64."""
        place = self._places.get(number)
        if place is None:
            return
        gradient = tensors.wide(gradient)
        product = (gradient * self._difference(place).to(gradient.dtype)).sum(dtype=torch.float64)
        row[self._groups[place]].add_(product.to(row.device), alpha=self._pieces[number])

    def _agreed(self, slopes: Tensor) -> NDArray[np.float64]:
        """What the first process found, in all: those of others may differ in the last bits."""
        replicas = self.scene.replicas
        row = replicas.gather(slopes.flatten().expand(len(replicas.local), -1))[0]
        agreed: NDArray[np.float64] = row.reshape(slopes.shape)
        return agreed
