"""Each replica's own loss over a window: what replicas that have come apart are compared by."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet.evidence.parts.unusable import look_everywhere
from hdet.evidence.scene import Harvest, Scene
from hdet.replicas import Replica, tensors
from hdet.signals import Probe


class ReplicaLosses:
    """Reads the signal of every replica; follows averaged weights where the probe wants them."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        probe = scene.signal
        self._averages = []
        if isinstance(probe, Probe) and probe.at == "average":
            self._averages = [scene.averages.follow(host, probe.stride) for host in range(len(scene.replicas.hosts))]

    def measure(self, harvest: Harvest) -> NDArray[np.float64]:
        """[N] training losses, or [N, J] probe losses at the weights the probe asks for; a collective then."""
        scene, window = self._scene, harvest.window.index
        probe, replicas = scene.signal, scene.replicas
        if not isinstance(probe, Probe):
            return harvest.losses
        batches = probe.draw(window)  # once: the comparison is paired
        rows = [self._losses(replica, window, batches) for replica in replicas.local]
        losses = replicas.gather(torch.stack(rows))
        look_everywhere(losses[harvest.valid])
        return losses

    def _losses(self, replica: Replica, window: int, batches: Sequence[Any]) -> Tensor:
        """[J] probe losses of a replica at the weights that are asked for."""
        scene, host = self._scene, replica.host
        model = scene.replicas.hosts[host][0]
        average = self._averages[host].mean() if self._averages else None
        elsewhere = nullcontext() if average is None else tensors.substituted(scene.moving.values(host), average)
        with elsewhere:
            return scene.probe.measure(model, window, replica.optimizer, batches)
