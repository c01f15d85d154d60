"""Divergent evidence: replicas trained at different values, compared by what they earned (the paper's)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hdet.controllers import Estimate
from hdet.controllers.estimators import Comparison, Estimator, LeastSquares
from hdet.controllers.state import from_plain, to_plain
from hdet.errors import ConfigError
from hdet.evidence.collector import Collector, Evidence
from hdet.evidence.parts.losses_at import Write, losses_at
from hdet.evidence.parts.replica_losses import ReplicaLosses
from hdet.evidence.scene import Harvest, Scene, Window
from hdet.hparams.bound_knob import BoundKnob
from hdet.hparams.design import Design, Hadamard, Permutation
from hdet.replicas import tensors
from hdet.signals import Probe
from hdet.spec import register


@register
class Divergent(Evidence):
    """Each replica trains a window at a level of its own; their losses are regressed on the levels.

    Args:
        design: who gets which level; `None` takes a randomised Hadamard where all spreads are two-level, else
            independent permutations.
        tilt: judge not the replicas themselves but the merged weights, tilted along the contrast of their
            weights: with C_k = d theta / d u_k by least squares over the replicas, the probe is evaluated at
            mean(theta) +- tilt * width_k * C_k. `None` judges each replica by its own loss. Needs a probe.
        estimator: turns levels and losses into slopes with standard errors; `None` takes `LeastSquares`, which
            under local gradients counts the replicas' own noise too.
    """

    diverges: ClassVar[bool] = True
    sees: ClassVar[frozenset[str]] = frozenset({"update"})

    estimator: Estimator | None = None
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
        if spec.tilt is not None and not isinstance(scene.signal, Probe):
            raise ConfigError(
                f"{', '.join(knob.name for knob in knobs)}: a tilt evaluates merged weights; give "
                f"signal=hdet.Probe(...) (in a run file, signal: probe), or tilt=None to compare the replicas' "
                f"own losses"
            )
        self.estimator = spec.estimator or LeastSquares(replica_noise=scene.gradients == "local")
        self.state = self.estimator.start(len(knobs))
        spreads = [knob.spec.spread for knob in knobs]
        self.two_level = [spread.two_level for spread in spreads]
        self.design = spec.design or (Hadamard() if all(self.two_level) else Permutation())
        n = scene.replicas.size
        self.ladders = [spread.levels(n) for spread in spreads]
        self.centres = [spread.centre(n) for spread in spreads]
        self.losses = None if spec.tilt is not None else ReplicaLosses(scene)

    def open(self, window: Window) -> None:
        drawn = self.design.assign(
            self.ladders,
            seed=self.scene.seed,
            window=window.index,
            names=[knob.name for knob in self.knobs],
            two_level=self.two_level,
        )
        wanted = (len(self.ladders[0]), len(self.knobs))
        if drawn.shape != wanted:
            raise ConfigError(
                f"{type(self.design).__name__}._assign gave an array of shape {drawn.shape}; {wanted} is wanted, a row "
                f"for each replica and a column for each knob"
            )
        for column, knob in enumerate(self.knobs):
            knob.spread(drawn[:, column], self.centres[column])

    def close(self, harvest: Harvest) -> dict[str, Estimate]:
        offsets = np.stack([knob.centre + knob.levels for knob in self.knobs], axis=1)
        levels = offsets * np.array([_mean_reach(knob, harvest.window) for knob in self.knobs])
        if self.spec.tilt is not None:
            return self._tilted(self.spec.tilt, levels, harvest)
        assert self.losses is not None
        comparison = Comparison(
            levels=levels,
            losses=self.losses.measure(harvest),
            shifts=np.array([knob.shift for knob in self.knobs]),
            valid=harvest.valid,
        )
        estimates, self.state = self._told(self.estimator.estimate(self.state, comparison))
        return {knob.name: estimate for knob, estimate in zip(self.knobs, estimates, strict=True)}

    def _told(self, answer: object) -> tuple[list[Estimate], Any]:
        """What an estimator, which may be one of somebody's own, answered.

        Raises:
            ConfigError: it is no list of an estimate for each knob, with the state.
        """
        if isinstance(answer, tuple) and len(answer) == 2:
            estimates, state = answer
            if (
                isinstance(estimates, list)
                and len(estimates) == len(self.knobs)
                and all(isinstance(estimate, Estimate) for estimate in estimates)
            ):
                return estimates, state
        raise ConfigError(
            f"{type(self.estimator).__name__}.estimate returned {answer!r}; it returns a list of {len(self.knobs)} "
            f"Estimates, one for each knob in order, and its next state"
        )

    def _tilted(self, tilt: float, levels: NDArray[np.float64], harvest: Harvest) -> dict[str, Estimate]:
        """Central differences of the probe loss along each knob's contrast of weights, about the mean.

        A knob of the forward pass is moved along with its contrast, since its value is part of what is judged.
        """
        valid = harvest.valid
        centred = levels[valid] - levels[valid].mean(axis=0)
        contrasts = np.zeros((len(self.knobs), len(valid)))
        inverse = np.linalg.pinv(centred)
        contrasts[:, valid] = inverse  # C_k = sum_r contrasts[k, r] theta_r
        told_apart = np.isclose(np.diag(inverse @ centred), 1.0)  # 0.7, say, where two knobs shared a column
        mean = valid / valid.sum()
        steps = tilt * np.abs(centred).max(axis=0)
        step_made = harvest.window.stop - 1
        points = [partial(self._tilt, step_made, mean, 0, 0.0)]
        for k, step in enumerate(steps):
            points += [partial(self._tilt, step_made, mean + x * contrasts[k], k, x) for x in (-step, step)]
        with self.scene.at_base():
            losses = losses_at(self.scene, harvest, points)
        found = {}
        for k, (knob, step) in enumerate(zip(self.knobs, steps, strict=True)):
            if step == 0.0 or not told_apart[k]:
                found[knob.name] = Estimate.nothing()
                continue
            below, here, above = losses[2 * k + 1], losses[0], losses[2 * k + 2]
            offset = float(levels[valid, k].mean())
            slopes, curvatures = (above - below) / (2 * step), (above - 2 * here + below) / step**2
            found[knob.name] = replace(Estimate.of_sub_batches(slopes, curvatures), offset=offset)
        return found

    def _tilt(self, step: int, weights: NDArray[np.float64], k: int, offset: float) -> Write:
        """Writes the combined weights; as a side effect knobs of the forward pass are set, the k-th off its base."""
        for number, knob in enumerate(self.knobs):
            if knob.spec.acts_on == "forward":
                value = knob.displaced(step, offset if number == k else 0.0)
                for host in range(len(self.scene.replicas.hosts)):
                    knob.write(host, value)
        return partial(tensors.copy_, sources=self.scene.replicas.combine(weights, self.scene.moving.flags))

    def state_dict(self) -> dict[str, Any]:
        return {"estimator": to_plain(self.state)}

    def load_state_dict(self, state: dict[str, Any], window: Window | None) -> None:
        self.state = from_plain(self.state, state["estimator"])


def _mean_reach(knob: BoundKnob, window: Window) -> float:
    """What the levels in force were of those drawn, on average over the window: near a bound they are narrower."""
    total = 0.0
    for reach in knob.reaches(window.start, window.stop):
        total += reach
    return total / max(1, window.stop - window.start)
