"""The slope of the probe along the update of every parameter group: one gradient gives those of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet.evidence.scene import Harvest, Scene
from hdet.replicas import gradients, tensors
from hdet.replicas.tensors import evaluating
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
        # By their number among the gradients: those that belong to a group.
        self._chosen = [number for number, parameter in enumerate(trained) if id(parameter) in place]
        places = [place[id(trained[number])] for number in self._chosen]
        self._groups = torch.tensor([groups[number] for number in places])
        live = scene.moving.values()
        with torch.no_grad():
            self._update = [end[n].to(live[n].device) - start[n].to(live[n].device) for n in places]
        # Of a sharded parameter a rank has a part of the product, and a replica's number is the mean over its ranks.
        pieces = [float(tensors.pieces(trained[number])) for number in self._chosen]
        self._pieces = torch.tensor(pieces, dtype=torch.float64)

    def mean(self, weights: Sequence[Tensor]) -> NDArray[np.float64]:
        """[K] slopes of the mean probe loss at some weights. One forward and one backward pass of the probe."""
        counts: list[int] = []

        def losses() -> Iterator[Tensor]:
            for loss in self._losses():
                counts.append(loss.numel())
                yield loss.sum()

        model = self.scene.replicas.hosts[0][0]
        with self._at(weights):
            row = self._products(gradients.summed(model, losses()))
        return self._agreed(row / sum(counts))

    def by_sub_batch(self, weights: Sequence[Tensor]) -> NDArray[np.float64]:
        """[J, K] slopes of each sub-batch's loss at some weights.

        Also one forward and one backward pass of the probe, if its loss gives one number for each of J batches. Where
        it gives all J at once, each is differentiated through the whole batch, at J times the price.
        """
        model = self.scene.replicas.hosts[0][0]
        rows = []
        with self._at(weights):
            for loss in self._losses():
                rows += [self._products(gradient) for gradient in gradients.of_each(model, loss)]
        return self._agreed(torch.stack(rows))

    @contextmanager
    def _at(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """The first model at some weights, every knob at its base, ready to be differentiated."""
        scene = self.scene
        scene.replicas.mean_buffers(self.harvest.valid.tolist())
        model, optimizer = scene.replicas.hosts[0]
        with (
            scene.at_base(),
            tensors.substituted(scene.moving.values(), weights),
            evaluating(model, optimizer),
            torch.enable_grad(),
        ):
            yield

    def _losses(self) -> Iterator[Tensor]:
        """What each of the probe's batches gives; asked for when the one before has been differentiated."""
        probe, model = self.scene.probe, self.scene.replicas.hosts[0][0]
        for batch in probe.draw(self.harvest.window.index):
            yield flat(probe.loss(model, batch))

    @torch.no_grad()
    def _products(self, gradient: Sequence[Tensor]) -> Tensor:
        """[K] slopes that one gradient gives, in float64."""
        own = zip((gradient[number] for number in self._chosen), self._update, strict=True)
        # One by one, so that no third set of weights is alive.
        sums = torch.stack([(g * u.to(g.dtype)).sum(dtype=torch.float64) for g, u in own])
        slopes = torch.zeros(self.count, dtype=torch.float64, device=sums.device)
        return slopes.index_add_(0, self._groups.to(sums.device), sums * self._pieces.to(sums.device))

    def _agreed(self, slopes: Tensor) -> NDArray[np.float64]:
        """What the first process found, in all: those of others may differ in the last bits."""
        replicas = self.scene.replicas
        row = replicas.gather(slopes.flatten().expand(len(replicas.local), -1))[0]
        agreed: NDArray[np.float64] = row.reshape(slopes.shape)
        return agreed
