"""Divergent evidence: replicas trained at different values, compared by what they earned (the paper's)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from hdet.controllers import Comparison, Estimate, Estimator, LeastSquares
from hdet.controllers.state import from_plain, to_plain
from hdet.evidence.collector import Collector, Harvest, Scene, Window
from hdet.evidence.points import losses_at
from hdet.hparams.bound import BoundKnob
from hdet.hparams.design import Design, Hadamard, Permutation
from hdet.hparams.evidence import Evidence
from hdet.replicas import tensors
from hdet.signals import Probe
from hdet.spec import register


@register
class Divergent(Evidence):
    """Each replica trains a window at a level of its own; their losses are regressed on the levels.

    Args:
        estimator: turns levels and losses into slopes with standard errors.
        design: who gets which level; `None` takes a randomised Hadamard where all spreads are two-level, else
            independent permutations.
        tilt: judge not the replicas themselves but the merged weights, tilted along the contrast of their
            weights: with C_k = d theta / d u_k by least squares over the replicas, the probe is evaluated at
            mean(theta) +- tilt * width_k * C_k. `None` judges each replica by its own loss.
    """

    diverges: ClassVar[bool] = True
    sees: ClassVar[frozenset[str]] = frozenset({"update"})

    estimator: Estimator = LeastSquares()
    design: Design | None = None
    tilt: float | None = Field(default=None, gt=0)

    def collect(self, scene: Scene, knobs: Sequence[BoundKnob]) -> DivergentCollector:
        """Its collector over knobs that are judged jointly."""
        return DivergentCollector(self, scene, knobs)


class DivergentCollector(Collector):
    """Draws the designs, follows averaged weights where the probe wants them, and regresses."""

    def __init__(self, spec: Divergent, scene: Scene, knobs: Sequence[BoundKnob]) -> None:
        super().__init__(scene, knobs)
        self.spec = spec
        self.state = spec.estimator.start(len(knobs))
        spreads = [knob.spec.spread for knob in knobs]
        self.two_level = [spread.two_level for spread in spreads]
        self.design = spec.design or (Hadamard() if all(self.two_level) else Permutation())
        n = scene.replicas.size
        self.ladders = [spread.levels(n) for spread in spreads]
        self.centres = [spread.centre(n) for spread in spreads]
        self.shrink = np.zeros(len(knobs))
        self.steps = 0
        probe = scene.signal
        self.averages = []
        if isinstance(probe, Probe) and probe.at == "average" and spec.tilt is None:
            self.averages = [
                scene.averages.follow(host, probe.stride) for host in range(len(scene.replicas.hosts))
            ]

    def open(self, window: Window) -> None:
        drawn = self.design.assign(
            self.ladders,
            seed=self.scene.seed,
            window=window.index,
            names=[knob.name for knob in self.knobs],
            two_level=self.two_level,
        )
        for column, knob in enumerate(self.knobs):
            knob.spread(drawn[:, column], self.centres[column])
        self.shrink = np.zeros(len(self.knobs))
        self.steps = 0

    def after_update(self, window: Window, step: int) -> None:
        # Near a bound the levels in force were narrower than those drawn; the regression uses what was in force.
        self.shrink += [knob.reach(knob.base(step)) for knob in self.knobs]
        self.steps += 1

    def close(self, harvest: Harvest) -> dict[str, Estimate]:
        levels = np.stack([knob.levels for knob in self.knobs], axis=1) * (self.shrink / max(1, self.steps))
        if self.spec.tilt is not None:
            return self._tilted(self.spec.tilt, levels, harvest)
        comparison = Comparison(
            levels=levels,
            losses=self._losses(harvest),
            shifts=np.array([knob.shift for knob in self.knobs]),
            valid=harvest.valid,
        )
        estimates, self.state = self.spec.estimator.estimate(self.state, comparison)
        return {knob.name: estimate for knob, estimate in zip(self.knobs, estimates, strict=True)}

    def _losses(self, harvest: Harvest) -> NDArray[np.float64]:
        """[N] training losses, or [N, J] probe losses at the weights the probe asks for."""
        probe = self.scene.signal
        if not isinstance(probe, Probe):
            return harvest.losses
        replicas = self.scene.replicas
        rows = []
        for replica in replicas.local:
            if self.averages:
                weights = tensors.parameters(replica.model)
                with tensors.substituted(weights, self.averages[replica.host].mean()):
                    rows.append(probe.measure(replica.model, harvest.window.index, replica.optimizer))
            else:
                rows.append(probe.measure(replica.model, harvest.window.index, replica.optimizer))
        return replicas.gather(torch.stack(rows))

    def _tilted(self, tilt: float, levels: NDArray[np.float64], harvest: Harvest) -> dict[str, Estimate]:
        """Central differences of the probe loss along each knob's contrast of weights, about the mean."""
        valid = harvest.valid
        centred = levels[valid] - levels[valid].mean(axis=0)
        contrasts = np.zeros((len(self.knobs), len(valid)))
        contrasts[:, valid] = np.linalg.pinv(centred)  # C_k = sum_r contrasts[k, r] theta_r
        mean = valid / valid.sum()
        steps = tilt * np.abs(levels).max(axis=0)
        points = [mean]
        for k, step in enumerate(steps):
            points += [mean - step * contrasts[k], mean + step * contrasts[k]]
        replicas = self.scene.replicas
        weights = [partial(replicas.combine, point) for point in points]
        with self.scene.at_base():
            losses = losses_at(replicas, self.scene.probe, harvest.window.index, weights)
        found = {}
        for k, (knob, step) in enumerate(zip(self.knobs, steps, strict=True)):
            if step == 0.0:
                found[knob.name] = Estimate.nothing()
                continue
            below, here, above = losses[2 * k + 1], losses[0], losses[2 * k + 2]
            found[knob.name] = _summary((above - below) / (2 * step), (above - 2 * here + below) / step**2)
        return found

    def state_dict(self) -> dict[str, Any]:
        return {
            "estimator": to_plain(self.state),
            "shrink": self.shrink.tolist(),
            "steps": self.steps,
        }

    def load_state_dict(self, state: dict[str, Any], window: Window | None) -> None:
        self.state = from_plain(type(self.state), state["estimator"])
        if window is None:
            return
        self.shrink = np.asarray(state["shrink"], dtype=np.float64)
        self.steps = int(state["steps"])


def _summary(slopes: NDArray[np.float64], curvatures: NDArray[np.float64]) -> Estimate:
    """Mean and standard error over the J paired sub-batches."""
    root = np.sqrt(len(slopes))
    return Estimate(
        slope=float(slopes.mean()),
        stderr=float(slopes.std(ddof=1) / root),
        curvature=float(curvatures.mean()),
        curvature_stderr=float(curvatures.std(ddof=1) / root),
    )
