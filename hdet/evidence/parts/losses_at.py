"""Evaluating the probe at several weight vectors, the work split over the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet.evidence.parts.batch_statistics import BatchStatistics, Statistics, statistics_of
from hdet.evidence.scene import Harvest, Scene
from hdet.replicas import tensors
from hdet.replicas.batch_norm import following
from hdet.replicas.dense import unwritten

Write = Callable[[Sequence[Tensor]], None]
"""Writes the weights of a point over the tensors that it is given, those of `Scene.moving` in one model."""

Point = Callable[[], Write]
"""Works out what every process has to work out together, and says how the point is written."""


def losses_at(
    scene: Scene,
    harvest: Harvest,
    points: Sequence[Point],
    kept: Sequence[Tensor] | None = None,
    *,
    independent: bool = False,
    statistics: Statistics | None = None,
) -> NDArray[np.float64]:
    """[P, J] probe losses at P points, the same on every process.

    Every process calls every point, because that may take a collective, but writes and evaluates only those that fall
    to its own replicas.

    Buffers are merged first, as they would be at the window's end: else what follows each replica's own data would
    differ between points that are compared.

    Args:
        kept: a copy of the first model's weights as they are, where there is one already.
        independent: no point looks at the models' weights, which are then put back after the last point only.
        statistics: of BatchNorm layers, at all points; by default each point has those of each of its batches.
    """
    window, replicas, probe = harvest.window.index, scene.replicas, scene.probe
    replicas.mean_buffers(harvest.valid.tolist())
    batches = probe.draw(window)
    rows: dict[tuple[int, int], Tensor] = {}
    aside: dict[int, _PutAside] = {}
    # A process that no point falls to evaluates one all the same, to learn J; its result is not counted.
    idle = all(replica.index >= len(points) for replica in replicas.local)
    try:
        for number, point in enumerate(points):
            if not independent:
                _put_back(aside)
            write = point()
            for row, replica in enumerate(replicas.local):
                if replica.index != number % replicas.size and not (idle and row == number == 0):
                    continue
                if replica.host not in aside:
                    aside[replica.host] = _PutAside(
                        scene, replica.host, kept if replica.host == 0 else None, statistics
                    )
                aside[replica.host].write(write)
                measured = probe.measure(
                    replicas.hosts[replica.host][0],
                    window,
                    replica.optimizer,
                    batches,
                    kept_statistics=statistics is not None,
                )
                rows[row, number] = torch.zeros_like(measured) if idle else measured
    finally:
        _put_back(aside)
    missing = torch.zeros_like(next(iter(rows.values())))
    table = torch.stack(
        [
            torch.cat([rows.get((row, number), missing) for number in range(len(points))])
            for row in range(len(replicas.local))
        ]
    )
    # Each point was evaluated by one replica and is zero in the other rows.
    losses: NDArray[np.float64] = replicas.gather(table).sum(axis=0).reshape(len(points), -1)
    scene.unusable.look(window, losses, replicas.size)
    return losses


def statistics_of_average(scene: Scene, harvest: Harvest, stride: int | None, average: Sequence[Tensor]) -> Statistics:
    """BatchNorm's statistics at the window-averaged weights of a stride, by what the probe's batches show there.

    Averaged weights have activations of less variance than the last ones, whose statistics are kept, and with these
    their loss is not what it would be. Every process works them out, once a window and stride. It takes an evaluation
    of the probe, and for the first stride one more, at the last weights.

    Args:
        average: these weights (`Scene.averaged`).

    Returns:
        Of no layer where none follows the batches, or where nothing was averaged.
    """
    layers, live = following(scene.replicas.hosts[0][0]), scene.moving.values()
    if not layers or average is live:
        return Statistics({})
    known, window = harvest.statistics, harvest.window.index
    if stride not in known.averaged:
        scene.replicas.mean_buffers(harvest.valid.tolist())
        # Of replicas that have come apart, the statistics that are kept now are those of all, as the mean of their
        # weights is.
        last = scene.weights(harvest.valid) if scene.apart and known.at_last is None else None
        aside = _PutAside(scene, 0, None, None)
        with scene.at_base():
            try:
                if known.at_last is None:
                    if last is not None:
                        aside.write(lambda live: tensors.copy_(live, last))
                    host, batches = scene.replicas.hosts[0], scene.probe.draw(window)
                    known.at_last = BatchStatistics.by_probe(layers, scene.probe, host, window, batches)
                aside.write(lambda live: tensors.copy_(live, average))
                known.averaged[stride] = known.at_last.limited()
            finally:
                aside.put_back()
    return known.averaged[stride]


class _PutAside:
    """One model's weights, and a copy of them to put back after points were written over them.

    Args:
        statistics: of BatchNorm layers, that it has at points.
    """

    def __init__(self, scene: Scene, host: int, kept: Sequence[Tensor] | None, statistics: Statistics | None) -> None:
        self._model = scene.replicas.hosts[host][0]
        tensors.reshard(self._model)
        self._live = scene.moving.values(host)
        self._kept = tensors.clones(self._live) if kept is None else kept
        self._written = False
        self._buffers = statistics_of(self._model) if statistics is not None and statistics.layers else []
        self._kept_buffers = tensors.clones(self._buffers)
        self._unwritten = unwritten([*self._live, *self._buffers])
        self._statistics = statistics

    def write(self, point: Write) -> None:
        """Put a point in place of the weights."""
        tensors.reshard(self._model)
        if not self._written and self._statistics is not None:
            self._statistics.put(self._model)
        self._written = True
        point(self._live)

    def put_back(self) -> None:
        """The weights as they were."""
        if self._written:
            tensors.reshard(self._model)
            with self._unwritten:
                tensors.copy_(self._live, self._kept)
                tensors.copy_(self._buffers, self._kept_buffers)
            self._written = False


def _put_back(aside: dict[int, _PutAside]) -> None:
    for own in aside.values():
        own.put_back()
