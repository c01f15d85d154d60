"""The guard: notices that training went wrong, goes back to where it had not, and slows down."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field

from hdet.evidence import Harvest, Scene
from hdet.evidence.fit import along
from hdet.replicas.anchor import Anchor
from hdet.spec import Spec, register


class Guard(Spec, family="guard"):
    """Decides at a window's end whether the run goes on from an earlier point, and what it keeps for that."""

    def watch(self, scene: Scene) -> Watch:
        """The guard at work on one engine's replicas."""
        raise NotImplementedError


@register
class Rewind(Guard):
    """Go back to the best point of the run if a long stretch since then was in vain, and continue slower.

    A network that a step too large has wrecked (dead units, saturated attention) sends no signal by which any
    knob could mend it. What tells is that training stands still: the window with the lowest mean training loss lies
    in the first `1 / patience` of the steps done, and the held-out loss there is lower than it is now, on the same
    batch, by `significance` standard errors. Overfitting does not trip it, since training loss falls then; nor does
    regularisation that pays, since held-out loss does.

    Then weights, buffers and optimizer return to that point, the step count goes on, and every controller is told
    (`Controller.retreat`): `Calibrate` continues below the rate that had worked there.

    Args:
        patience: how many times longer the run must be than it was at its best point.
        significance: standard errors of the paired held-out difference.
        keep: where the best point is kept: one more copy of weights and optimizer state, on the host by default.
    """

    patience: float = Field(default=1.5, gt=1, le=100)
    significance: float = Field(default=3.0, gt=0, le=100)
    keep: Literal["host", "device"] = "host"

    def watch(self, scene: Scene) -> Watch:
        return Watch(self, scene)


class Watch:
    """Keeps the best point of a run."""

    def __init__(self, spec: Rewind, scene: Scene) -> None:
        self.spec = spec
        self.scene = scene
        self.held = Anchor(*scene.replicas.hosts[0], device="cpu" if spec.keep == "host" else None)
        self.lowest = math.inf
        self.since = 0
        self.bases: dict[str, float] = {}

    def look(self, harvest: Harvest, bases: Mapping[str, float]) -> bool:
        """Whether the run should go back; else takes the point if it is the best so far.

        Call when the replicas have been merged. `bases` are the window's.
        """
        loss, step = float(harvest.losses[harvest.valid].mean()), harvest.window.stop
        if loss < self.lowest:
            self.held.take(step)
            self.lowest, self.since, self.bases = loss, step, dict(bases)
            return False
        if not self.bases or step < self.spec.patience * self.since:
            return False
        return self._lost(harvest) > self.spec.significance

    def _lost(self, harvest: Harvest) -> float:
        """t of the held-out loss now against that at the held point."""
        scene = self.scene
        model, optimizer = scene.replicas.hosts[0]
        batches = scene.probe.draw(harvest.window.index)
        with scene.at_base():
            now = scene.probe.measure(model, harvest.window.index, optimizer, batches)
            with self.held.substituted():
                then = scene.probe.measure(model, harvest.window.index, optimizer, batches)
        # Every process takes the first one's reading: those of others may differ in the last bits.
        rows = scene.replicas.gather(torch.cat([then, now]).expand(len(scene.replicas.local), -1))
        return along((0.0, 1.0), rows[0].reshape(2, -1)).t

    def go_back(self, step: int) -> None:
        """Put the held point into every model; it is given until `patience * step` to be bettered."""
        self.scene.replicas.restored(merged=True)
        for model, optimizer in self.scene.replicas.hosts:
            self.held.restore(model, optimizer)
        self.since = step

    def state_dict(self) -> dict[str, Any]:
        """The best point and what is known of it."""
        return {
            "lowest": self.lowest,
            "since": self.since,
            "bases": dict(self.bases),
            "held": self.held.state_dict() if self.bases else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; without a held point (a sharded checkpoint has none) the watch starts anew."""
        if state["held"] is None:
            self.lowest, self.since, self.bases = math.inf, 0, {}
            return
        self.lowest, self.since, self.bases = state["lowest"], state["since"], dict(state["bases"])
        self.held.load_state_dict(state["held"])
