"""Evaluating the probe at several weight vectors, the work split over the replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet.evidence.scene import Harvest, Scene
from hdet.replicas import tensors
from hdet.user_warning import warn

Point = Callable[[], Iterable[Tensor]]


def losses_at(
    scene: Scene, harvest: Harvest, points: Sequence[Point], kept: Sequence[Tensor] | None = None
) -> NDArray[np.float64]:
    """[P, J] probe losses at P points, the same on every process.

    Each point is a function that gives the weights there (those of `Scene.moving`, in its order). Every process calls
    every point, because that may take a collective, but evaluates only those that fall to its own replicas: a point
    that gives its weights one by one is never in memory as a whole.

    Buffers are merged first, as they would be at the window's end: else BatchNorm's statistics, which follow each
    replica's own data, would differ between points that are compared.

    Args:
        kept: a copy of the first model's weights as they are, where there is one already.
    """
    window, replicas, probe = harvest.window.index, scene.replicas, scene.probe
    replicas.mean_buffers(harvest.valid.tolist())
    batches = probe.draw(window)
    rows: dict[tuple[int, int], Tensor] = {}
    saved: dict[int, Sequence[Tensor]] = {} if kept is None else {0: kept}
    # A process that no point falls to evaluates one all the same, to learn J; its result is not counted.
    idle = all(replica.index >= len(points) for replica in replicas.local)
    for number, point in enumerate(points):
        weights = point()
        for row, replica in enumerate(replicas.local):
            if replica.index != number % replicas.size and not (idle and row == number == 0):
                continue
            with _at(scene, replica.host, weights, saved):
                measured = probe.measure(replicas.hosts[replica.host][0], window, replica.optimizer, batches)
            rows[row, number] = torch.zeros_like(measured) if idle else measured
    missing = torch.zeros_like(next(iter(rows.values())))
    table = torch.stack(
        [
            torch.cat([rows.get((row, number), missing) for number in range(len(points))])
            for row in range(len(replicas.local))
        ]
    )
    # Each point was evaluated by one replica and is zero in the other rows.
    losses: NDArray[np.float64] = replicas.gather(table).sum(axis=0).reshape(len(points), -1)
    _notice_unusable(losses)
    return losses


@contextmanager
def _at(scene: Scene, host: int, weights: Iterable[Tensor], saved: dict[int, Sequence[Tensor]]) -> Iterator[None]:
    """Weights in place of a model's own inside the block; `saved` keeps copies of these from one point to the next."""
    tensors.reshard(scene.replicas.hosts[host][0])
    live = scene.moving.values(host)
    if host not in saved:
        saved[host] = tensors.clones(live)
    try:
        with torch.no_grad():
            for own, value in zip(live, weights, strict=True):
                own.copy_(value)
        yield
    finally:
        tensors.reshard(scene.replicas.hosts[host][0])
        tensors.copy_(live, saved[host])


def _notice_unusable(losses: NDArray[np.float64]) -> None:
    """Say which sub-batches are finite at no point: they tell nothing of a point, and all else is lost with them."""
    unusable = np.flatnonzero(~np.isfinite(losses).any(axis=0)).tolist()
    if unusable:
        warn(
            f"the probe's loss is not finite on sub-batches {unusable} of {losses.shape[1]}, at any weights that "
            f"it was evaluated at, so that nothing is learnt from any: look at these batches (an empty mask, a label "
            f"that is missing) and at the loss"
        )
