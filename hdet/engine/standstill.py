"""Whether the optimizers step at all: a loop that never calls them explores nothing, and fails in nothing else."""

from __future__ import annotations

import numpy as np
import torch

from hdet.evidence import Scene, Window
from hdet.replicas.replicas import present
from hdet.user_warning import warn


class Standstill:
    """Compares each replica's weights with those of the window's opening, once, and says where none has changed.

    A window without a training pass tells nothing, nor does one that ends at a learning rate of 0 in all groups, as at
    the start of a warm-up.

    Attributes:
        done: whether a window has told; the same in all processes.
    """

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.done = False

    def look(self, window: Window, *, trained: bool) -> None:
        """A window's last step is done, and nothing is merged yet. A collective until a window has told.

        Args:
            trained: whether this process has entered a replica in this run.
        """
        if self.done:
            return
        hosts = [self._host(host) if trained else (0.0, 0.0) for host in range(len(self._scene.replicas.hosts))]
        device = self._scene.moving.parameters[0][0].device if self._scene.moving.parameters[0] else None
        rows = torch.tensor([hosts[replica.host] for replica in self._scene.replicas.local], device=device)
        told = self._scene.replicas.gather(rows)
        stepped, changed = (told.T > 0.0) & present(told)
        self.done = bool(stepped.any())
        still = np.flatnonzero(stepped & ~changed).tolist()
        if still:
            named = ", ".join(map(str, still))
            warn(
                f"no weight of replica {named} has changed in steps {window.start} to {window.stop - 1}, so nothing is "
                f"learnt of any hyperparameter: call step() on each of engine.optimizers, made from the parameters of "
                f"the replica's model, before engine.step (steps that a GradScaler skipped change nothing either)"
            )

    def _host(self, host: int) -> tuple[float, float]:
        """Whether a step would change a model's weights, and whether any has."""
        pairs = zip(self._scene.opening(), self._scene.moving.values(host), strict=True)
        changed = any(not torch.equal(opened.to(own.device), own) for opened, own in pairs)  # mostly the first has
        groups = self._scene.replicas.hosts[host][1].param_groups
        return float(any(float(group["lr"]) != 0.0 for group in groups)), float(changed)
