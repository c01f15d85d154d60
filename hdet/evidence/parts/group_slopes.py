"""The slope of the probe along the update of every parameter group: one gradient gives those of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet.evidence.scene import Harvest, Scene
from hdet.replicas import gradients, tensors
from hdet.signals.probe import flat


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

    def by_sub_batch(self, weights: Sequence[Tensor]) -> NDArray[np.float64]:
        """[J, K] slopes of each sub-batch's loss at some weights.

        Also one forward and one backward pass of the probe, if its loss gives one number for each of J batches. Where
        it gives all J at once, each is differentiated through the whole batch, at J times the price.
        """
        return self._agreed(torch.stack([row for row, _ in self._rows(weights, lambda loss: loss)]))

    def _rows(self, weights: Sequence[Tensor], of: Callable[[Tensor], Tensor]) -> list[tuple[Tensor, int]]:
        """[K] slopes of each loss that `of` makes of a batch's, and how many losses the batch gave."""
        rows: list[tuple[Tensor, int]] = []

        def begin() -> gradients.Take:
            row = torch.zeros(self.count, dtype=torch.float64, device=device)
            rows.append((row, count))
            return partial(self._add_product, row)

        model = self.scene.replicas.hosts[0][0]
        with self._at(weights):
            for loss in self._losses():
                count, device = loss.numel(), loss.device
                gradients.handed_over(model, of(loss), begin)
        return rows

    @contextmanager
    def _at(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """The first model at some weights, every knob at its base, ready to be differentiated."""
        scene = self.scene
        scene.replicas.mean_buffers(self.harvest.valid.tolist())
        model, optimizer = scene.replicas.hosts[0]
        with (
            scene.at_base(),
            tensors.substituted(scene.moving.values(), weights),
            tensors.evaluating(model, optimizer),
            torch.enable_grad(),
        ):
            yield

    def _losses(self) -> Iterator[Tensor]:
        """What each of the probe's batches gives; asked for when the one before has been differentiated."""
        probe, model = self.scene.probe, self.scene.replicas.hosts[0][0]
        for batch in probe.draw(self.harvest.window.index):
            yield flat(probe.loss(model, batch))

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
