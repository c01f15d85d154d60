"""Contrast evidence: what a knob of the forward pass does to gradients, read without any replica diverging."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from hdet.controllers import Estimate
from hdet.evidence.collector import Collector, Evidence
from hdet.evidence.parts.gradient_memory import Dots, Record, Traces
from hdet.evidence.parts.gradient_sketch import GradientSketch
from hdet.evidence.parts.probe_gradient import aim
from hdet.evidence.parts.two_levels import Levels
from hdet.evidence.scene import Harvest, Scene, Window
from hdet.hparams.bound import BoundKnob
from hdet.hparams.design import Hadamard, mirrored
from hdet.hparams.hadamard import order_from
from hdet.hparams.spread import TwoLevel
from hdet.replicas import Replica
from hdet.spec import register
from hdet.user_warning import warn

SMALLEST_BLOCK = 4


@register
class Contrast(Evidence):
    """The contrast of local gradients between levels, along the gradient of the held-out loss.

    Replicas share gradients and stay alike; replica r runs its forward pass of step t at u_k + s_rkt d_k, with
    signs s from a fresh design every step (signs fixed over a window would confound levels with data shards).
    With g_p the gradient of the probe loss at the shared weights and v = P g_p, P the optimizer's diagonal
    preconditioner, each replica's own gradient g_r before it is shared gives one number c_r = <v, g_r>, and

        h_kt = -(1/N) sum_r s_rkt c_rt

    estimates d L_probe / d u_k times d_k for one step. Slope and standard error are over the steps of a window.
    Replicas may be no more than the micro-batches of one model. Where there are too few for the knobs, several
    steps form one block of the design.

    One step ahead, any regulariser looks bad. With a `horizon` the contrasted gradients themselves are summed and
    fade over that many steps, across windows, and v is that of the window's end: what a level did long ago is judged
    by the held-out loss of now.

    Of a gradient no more than `sketch` numbers are kept: a linear sketch (`hdet.evidence.parts.sketch`), unbiased for
    inner products, whose error is small against the gradients' own scatter. Up to so many parameters it is the gradient
    itself. With a horizon `groups` + 1 sketches are kept for each knob; without, one in all.

    Near a bound both levels lie inside it, one of them on the bound. Exploring costs something there if the bound is
    best, as no dropout is on data that never repeat. So a base on its bound is not explored before `bound_from`, and
    then only in windows where the held-out loss lies above the training loss of the window before: by two standard
    errors and 2 %. (Knobs that also act in eval mode are no regularisers, and explore.)

    A knob that also acts in eval mode (a temperature) changes the probe itself, besides what is learned: to the
    slope of the window's T steps, T mean_t(h), is added that of the probe between the two levels at the window's
    last weights. An estimate needs at least 8 blocks; windows with fewer save them up.

    The standard error is that of the training gradients along a given v. The probe's own noise is in v: a probe
    much smaller than a training batch gives a surer estimate than it should.

    `paired`: replicas 2 i and 2 i + 1 take the same data, `replica.data_index` says which, and draw the same random
    numbers, at opposite signs of every knob. What data and dropout masks do to the gradient is then alike in both and
    drops out of their difference, and t grows: twice or more where levels differ by little against the noise of a
    batch. The price is paid by training: the mean gradient is that of N / 2 batches, each passed twice: half the data.
    A step's data come in `engine.data_shards` = N / 2 parts. Inside `with replica:` torch's generators follow from
    the engine's seed; afterwards they are as they were. N is even, and all Contrasts of an engine are paired or none.

    Args:
        horizon: steps over which contrasts are remembered; 0 for those of one window only, by dot products.
        groups: of blocks, whose scatter gives the standard error with a horizon.
        refresh: without a horizon, steps after which v is computed anew; each costs one gradient of the probe.
        bound_from: share of the run before which a base on a bound is not explored. Networks that have learnt little
            want no regularisation; it is no use to ask them.
        paired: compare two replicas on the same data with the same random numbers.
        sketch: most numbers kept of one gradient.

    The width d_k is the knob's `spread.width`. Under a GradScaler slopes are multiplied by its scale, t is not.
    """

    needs_probe: ClassVar[bool] = True
    shared: ClassVar[bool] = True
    sees: ClassVar[frozenset[str]] = frozenset({"forward"})

    horizon: int = Field(default=0, ge=0)
    groups: int = Field(default=8, ge=2, le=64)
    refresh: int = Field(default=50, ge=1)
    bound_from: float = Field(default=0.3, ge=0, le=1)
    paired: bool = False
    sketch: int = Field(default=2**20, ge=2**10, le=2**30)

    def collect(self, scene: Scene, knobs: Sequence[BoundKnob]) -> ContrastCollector:
        return ContrastCollector(self, scene, knobs)


class ContrastCollector(Collector):
    """Draws signs, passes each replica's gradient to a record, and says which knobs explore when."""

    def __init__(self, spec: Contrast, scene: Scene, knobs: Sequence[BoundKnob]) -> None:
        super().__init__(scene, knobs)
        self.spec = spec
        replicas = scene.replicas
        # Rows of one design block: N replicas times as many steps as it takes to tell the knobs apart. Pairs are
        # balanced by themselves.
        fewest = 2 * order_from(len(knobs)) if spec.paired else max(SMALLEST_BLOCK, len(knobs) + 1)
        self.block_steps = -(-fewest // replicas.size)
        self.ladder = TwoLevel(1.0).levels(replicas.size * self.block_steps)
        self.design = Hadamard()
        self.levels = Levels(scene, self.knobs, spec.bound_from)
        self.half, self.centre = self.levels.half, self.levels.centre
        self.rate = 1.0 if spec.horizon else None  # traces hold each step's learning rates themselves
        self.record: Record = (
            Traces(replicas, len(knobs), self.block_steps, spec.horizon, spec.groups)
            if spec.horizon
            else Dots(replicas, len(knobs), self.block_steps, spec.refresh)
        )
        self.training = math.nan  # mean training loss of the last window
        self.step = 0
        self.exploring = False
        self.deaf = False  # a pass that gave no gradient was warned of
        self.seen: dict[int, Tensor] = {}  # by host, the sketch of the gradient that has gathered in this step
        self.folding = GradientSketch(replicas.hosts, spec.sketch)
        self.given: Tensor | None = None  # the sketch of what the pass under way was seen to give
        self.handed_over = False  # whether gradients are given as backward goes on

    def open(self, window: Window) -> None:
        self.seen = {}
        self._notice()
        self.levels.place(window, window.start, self.training)
        if self.half.any():
            self.record.open(partial(self._aim, window))
        self._spread(window, window.start)

    @property
    def needs_passes(self) -> str | None:
        # From the first step on, though knobs may explore later only: a loop that never says so is told at once.
        explored = any(knob.spec.spread.width for knob in self.knobs)
        return "Contrast evidence observes each one's gradient there" if explored else None

    @property
    def pairs(self) -> bool:
        return self.spec.paired and self.exploring

    def enter(self, replica: Replica, step: int) -> None:
        if not self.exploring:
            return
        self._notice()
        folding, host = self.folding, replica.host
        self.given = None

        def take(numbers: Sequence[int], gradients: Sequence[Tensor]) -> None:
            self.given = folding.sketch.zeros() if self.given is None else self.given
            folding.fold_(self.given, numbers, gradients, self._rates(host))

        self.handed_over = self.scene.replicas.observe(folding.parameters[host], take)

    def exit(self, replica: Replica, step: int) -> None:
        if not self.exploring:
            return
        if not self.handed_over:
            self._notice()
        gradient = self.given if self.handed_over else self._added(replica)
        self.given = None
        if gradient is None:
            self._leave_out(replica, step)
        else:
            self.record.add(replica, gradient, self.signs, self.half)

    def miss(self, replica: Replica, step: int) -> None:
        if self.exploring:
            self.record.reject(replica)

    def _leave_out(self, replica: Replica, step: int) -> None:
        self.record.reject(replica)
        if not self.deaf:
            self.deaf = True
            warn(
                f"no backward pass ran inside `with replica:` in step {step}, so Contrast sees no gradient of replica "
                f"{replica.index} and learns nothing from such steps; call loss.backward() inside the block (said once)"
            )

    def _notice(self) -> None:
        """Start the record anew where parameters were frozen or thawed: gradients compared are of the same ones."""
        if self.folding.is_outdated():
            self.folding = GradientSketch(self.scene.replicas.hosts, self.spec.sketch)
            self.seen = {}
            self.record.renew()

    def _rates(self, host: int) -> list[float | Tensor]:
        """What gradients are multiplied by: traces hold each step's learning rates, dot products have them in v."""
        rates = self.folding.rates(host)
        return rates if self.spec.horizon else [1.0] * len(rates)

    def _added(self, replica: Replica) -> Tensor | None:
        """The sketch of what a pass has added to the gradients of its model; `None` where these have none."""
        gradients = self.folding.gradients(replica.host)
        if gradients and all(gradient is None for gradient in gradients):
            return None
        total = self.folding.folded(gradients, self._rates(replica.host))
        # Seats of one model, and accumulation, add to one gradient: what this pass added is its own.
        own = total - self.seen[replica.host] if replica.host in self.seen else total
        self.seen[replica.host] = total
        return own

    def after_update(self, window: Window, step: int) -> None:
        last = step + 1 == window.stop
        self.record.end_step(step, self.signs if self.exploring else None, last)
        self.seen = {}
        if not last:
            self._spread(window, step + 1)

    def close(self, harvest: Harvest) -> dict[str, Estimate]:
        self._notice()
        self.scene.replicas.observe_no_more()
        window = harvest.window
        heard_losses = harvest.losses[harvest.valid]
        self.training = float(heard_losses.mean())
        heard = [k for k, half in enumerate(self.half) if half > 0.0]
        estimates = self.record.close(heard, self.half, partial(self._aim, window))
        return self.levels.told(estimates, harvest)

    def _signs(self, window: Window, step: int) -> NDArray[np.float64]:
        """[N, K] signs of a step: its rows of the block it belongs to, 0 for knobs that rest."""
        active = self._active(window, step)
        n = self.scene.replicas.size
        if not active.any():
            return np.zeros((n, len(self.knobs)))
        within = (step - window.start) % self.block_steps
        signs: NDArray[np.float64] = self._block(step - within)[within * n : (within + 1) * n] * active
        return signs

    def _block(self, first: int) -> NDArray[np.float64]:
        """[N * block_steps, K] signs of the block that begins with a step."""
        names = [knob.name for knob in self.knobs]
        if self.spec.paired:
            return mirrored(len(self.ladder) // 2, seed=self.scene.seed, window=first, names=names)
        return self.design.assign(
            [self.ladder] * len(names),
            seed=self.scene.seed,
            window=first,
            names=names,
            two_level=[True] * len(names),
        )

    def _active(self, window: Window, step: int) -> NDArray[np.bool_]:
        """[K] which knobs explore in a step; none in a block that the window's end would cut short."""
        end = step - (step - window.start) % self.block_steps + self.block_steps
        active: NDArray[np.bool_] = self.half > 0.0
        return active if self.record.ready and end <= window.stop else np.zeros_like(active)

    def _spread(self, window: Window, step: int) -> None:
        """Put the levels of a step in force; a knob that rests is at its base."""
        self.window, self.step = window, step
        active, signs = self._active(window, step), self._signs(window, step)
        self.exploring, self.signs = bool(active.any()), signs
        for k, knob in enumerate(self.knobs):
            knob.spread(signs[:, k] * self.half[k], float(self.centre[k]) if active[k] else 0.0)

    def _aim(self, window: Window) -> Tensor | None:
        """v at the weights as they are; `None` before the optimizer has a state to read P from."""
        found = aim(self.scene, window.index, self.rate)
        return None if found is None else self.folding.folded_trained(found.step)

    def forget(self) -> None:
        self.record.forget()

    def state_dict(self) -> dict[str, Any]:
        training = self.training if math.isfinite(self.training) else None
        return {"record": self.record.state_dict(), "training": training, "step": self.step}

    def load_state_dict(self, state: dict[str, Any], window: Window | None) -> None:
        self.training = math.nan if state["training"] is None else float(state["training"])
        self.open(self.window)  # once more: who rests depends on the training loss
        sketch = self.folding.sketch
        self.record.load_state_dict(state["record"], sketch.device, sketch.size, window is not None)
        if window is not None:
            self._spread(window, state["step"])
