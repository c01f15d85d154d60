"""GRAWA: replicas in flatter places weigh more."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from hdet.errors import CheckpointError, ConfigError
from hdet.evidence.scene import Harvest, Scene
from hdet.merging.merge import Averager, Merge, OptimizerState
from hdet.replicas import gradients, tensors
from hdet.replicas.random_numbers import accelerators_in_use, seeded
from hdet.replicas.replica import Replica
from hdet.signals import Probe
from hdet.spec import register


@register
class Grawa(Merge):
    """theta <- sum_r w_r theta_r with w_r = (1 / A_r) / sum_s (1 / A_s), A_r a replica's gradient norm.

        A_r <- momentum A_r + (1 - momentum) |g_r|,   divided by 1 - momentum^windows

    g_r is the gradient at replica r's weights at the window's end, on the same batches for all: the engine's
    `objective`, or else its probe; in eval mode, every knob at its base. With `layers` each module weighs by its own
    norms. Source: Dimlioglu and Choromanska 2024, arXiv 2403.04206 (MGRAWA, and LGRAWA by layers). There workers are
    pulled part of the way to the centre; here all the way, since a window opens with all replicas alike.

    For replicas that end windows in places of different sharpness, of which the flat ones are to count more. Costs one
    gradient a replica and window.

    Args:
        layers: weigh each module's own parameters by themselves.
        momentum: share of the norms kept from window to window; the authors' code has 0.9^8.
        optimizer: as of `Mean`; what is averaged is weighted by the mean of the layers' weights.
    """

    layers: bool = Field(default=False, kw_only=False)
    momentum: float = Field(default=0.43, ge=0, lt=1)
    optimizer: OptimizerState = "average"

    def at_work(self, scene: Scene) -> ByGradient:
        return ByGradient(self, scene)


class ByGradient(Averager):
    """Weighs replicas by their gradient norms, smoothed over windows.

    Attributes:
        norms: [N, L] smoothed norms, by replica and layer; None before the first window.
        told: [N] windows that they are of.
    """

    def __init__(self, spec: Grawa, scene: Scene) -> None:
        super().__init__(scene, spec.optimizer)
        if scene.objective is None and not isinstance(scene.signal, Probe):
            raise ConfigError(
                "Grawa weighs replicas by gradients on common batches, and was told of none; give the engine "
                "objective=hdet.Objective(loss, batches) or signal=hdet.Probe(loss, batches)"
            )
        self.spec = spec
        self.norms: NDArray[np.float64] | None = None
        self.told = np.zeros(scene.replicas.size)

    def weights(self, harvest: Harvest) -> NDArray[np.float64]:
        scene = self.scene
        layers = _layers(scene, whole=not self.spec.layers)
        with scene.at_base():
            rows = [self._squares(replica, harvest.window.index, layers) for replica in scene.replicas.local]
        norms = np.sqrt(scene.replicas.gather(torch.stack(rows)))
        sound = harvest.valid & np.isfinite(norms).all(axis=1)
        if self.norms is None or self.norms.shape != norms.shape:
            self.norms, self.told = np.zeros_like(norms), np.zeros(len(norms))
        b = self.spec.momentum
        self.norms[sound] = b * self.norms[sound] + (1 - b) * norms[sound]
        self.told[sound] += 1
        return inverse(self.norms / (1 - b ** np.maximum(self.told, 1))[:, None], sound, harvest.valid)[:, layers]

    def _squares(self, replica: Replica, window: int, layers: list[int]) -> Tensor:
        """[L] squared norms of the gradient at a replica's weights; of a sharded model this rank's share, times parts.

        `Replicas.gather` takes the mean over the ranks of one replica.
        """
        model, optimizer = self.scene.replicas.hosts[replica.host]
        around = replica.around() if replica.around is not None else nullcontext()
        numbers = seeded(accelerators_in_use(), f"hdet.grawa:{window}")
        with around, tensors.evaluating(model, optimizer), numbers, torch.enable_grad():
            found = gradients.summed(model, (loss for loss in self._losses(model, window)))
        squares = torch.zeros(max(layers) + 1, dtype=torch.float64, device=found[0].device)
        layer_of = dict(zip(map(id, tensors.moving_parameters(model, optimizer)), layers, strict=True))
        for parameter, gradient in zip(tensors.trained(model), found, strict=True):
            squares[layer_of[id(parameter)]] += gradient.abs().double().square().sum() * tensors.pieces(parameter)
        return squares

    def _losses(self, model: nn.Module, window: int) -> Any:
        source = self.scene.objective or self.scene.probe
        return (source.loss(model, batch).sum() for batch in source.draw(window))

    def forget(self) -> None:
        self.norms = None

    def state_dict(self) -> dict[str, Any]:
        if self.norms is None:
            return {}
        return {"norms": self.norms.tolist(), "told": self.told.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        norms = np.array(state["norms"], dtype=np.float64)
        if norms.ndim != 2 or norms.shape[1] != 1 + max(_layers(self.scene, whole=not self.spec.layers)):
            raise CheckpointError(
                f"the checkpoint's gradient norms are {list(norms.shape)}, of another model; build the model as it was"
            )
        self.norms, self.told = norms, np.array(state["told"], dtype=np.float64)


def inverse(norms: NDArray[np.float64], sound: NDArray[np.bool_], valid: NDArray[np.bool_]) -> NDArray[np.float64]:
    """[N, L] weights that sum to 1 over replicas: inverse to [N, L] norms, and 0 where a replica is not sound.

    Args:
        valid: [N] those that weigh alike where no replica is sound, or no norm of a layer is above 0.

    >>> inverse(np.array([[1.0], [3.0], [0.5]]), np.array([True, True, False]), np.ones(3, dtype=bool)).T
    array([[0.75, 0.25, 0.  ]])
    """
    taking = np.where(sound.any(), sound, valid)[:, None]
    largest = np.where(sound[:, None], norms, 0.0).max(axis=0)
    even = (largest == 0.0) | ~sound.any()
    # A gradient of 0 is a flat place, and takes all but a trace of the weight.
    raw = np.where(even, 1.0, largest / np.maximum(norms, 1e-12 * np.where(even, 1.0, largest))) * taking
    weights: NDArray[np.float64] = raw / raw.sum(axis=0)
    return weights


def _layers(scene: Scene, *, whole: bool) -> list[int]:
    """For each parameter that can move the number of its layer: the module that owns it, or all the model."""
    host = scene.replicas.hosts[0]  # those that are merged: one may have been thawed since the window opened
    names = {id(parameter): name for name, parameter in host[0].named_parameters()}
    moving = tensors.moving_parameters(*host)
    owners = ["" if whole else names[id(parameter)].rpartition(".")[0] for parameter in moving]
    numbers = {owner: number for number, owner in enumerate(dict.fromkeys(owners))}
    return [numbers[owner] for owner in owners]
