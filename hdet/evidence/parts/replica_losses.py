"""Each replica's own loss over a window: what replicas that have come apart are compared by."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hdet.evidence.scene import Harvest, Scene
from hdet.replicas import tensors
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
        rows = []
        for replica in replicas.local:
            weights = scene.moving.values(replica.host) if self._averages else []
            means = self._averages[replica.host].mean() if self._averages else []
            with tensors.substituted(weights, means):
                rows.append(probe.measure(replicas.hosts[replica.host][0], window, replica.optimizer, batches))
        return replicas.gather(torch.stack(rows))
