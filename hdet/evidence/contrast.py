"""Contrast evidence: the effect of a knob of the forward pass on gradients, measured while all replicas stay equal."""

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
from hdet.errors import CheckpointError
from hdet.evidence.collector import Collector, Evidence
from hdet.evidence.parts.gradient_memory import Dots, Record, Traces
from hdet.evidence.parts.gradient_sketch import GradientSketch
from hdet.evidence.parts.probe_gradient import aim, leaves_no_state
from hdet.evidence.parts.two_levels import Levels
from hdet.evidence.scene import Harvest, Scene, Window
from hdet.hparams.bound_knob import BoundKnob
from hdet.hparams.design import Hadamard, mirrored
from hdet.hparams.hadamard import order_from
from hdet.hparams.spread import TwoLevel
from hdet.replicas import Replica
from hdet.spec import register
from hdet.user_warning import warn

SMALLEST_BLOCK = 4
IN_VAIN = 5
"""Windows on end with parameters frozen or thawed and nothing learned, after which this is said."""


@register
class Contrast(Evidence):
    """Compare the replicas' gradients at two levels of a knob, along the gradient of the held-out loss.

    Replicas share gradients, so their weights stay equal. In step t replica r runs its forward pass with knob k at
    u_k + s_rkt d_k. The signs s come from a new balanced design in every step. (With fixed signs, a replica with other
    data would look like a replica with another level.) Let g_p be the gradient of the probe loss at the shared weights,
    and v = P g_p, with P the optimizer's diagonal preconditioner. Each replica's own gradient g_r, before it is shared,
    gives one number c_r = <v, g_r>, and

        h_kt = -(1/N) sum_r s_rkt c_rt

    estimates d L_probe / d u_k times d_k, the knob's `spread.width`, for one step. Slope and standard error are over
    the steps of a window. The micro-batches of one model can be the replicas. Where a step has too few replicas for the
    number of knobs, several steps form one block of the design. An estimate needs at least 8 blocks.

    Seen one step ahead, any regulariser looks bad. With a `horizon` the contrasted gradients themselves are summed
    across windows, and fade over that many steps. Then v is read at the window's end, so the held-out loss of now
    judges what a level did long ago.

    The standard error is that of the training gradients along a given v. The noise of the probe is in v and does not
    show: a probe much smaller than a training batch makes an estimate look more certain than it is.

    docs/evidence.md says how knobs near a bound and knobs that act in eval mode are treated, what sketches and steps
    without evidence cost, and what pairs are good for.

    Args:
        horizon: steps over which contrasts are remembered; 0 for those of one window only, by dot products.
        groups: with a horizon, groups of blocks; their scatter gives the standard error.
        refresh: without a horizon, steps after which v is computed anew; each costs one gradient of the probe.
        bound_from: share of the run before which a base on a bound is not explored. Early in training a network wants
            no regularisation, so exploring tells nothing.
        paired: replicas 2 i and 2 i + 1 take the same data (`replica.data_index`, in `engine.data_shards` = N / 2
            parts) with the same random numbers, at opposite levels. A step then sees half the data, and N has to be
            even. All Contrasts of an engine are paired or none is.
        sketch: largest count of numbers kept of one gradient (`hdet.evidence.parts.sketch`): in `groups` + 1 sketches
            for each knob with a horizon, in one without.
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
        # Rows of one design block: N replicas times the steps needed to tell the knobs apart. A pair is balanced
        # in itself.
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
        self.stateless = False  # whether the optimizer is known to keep no state
        self.step = 0
        self.drawn = (-1, np.empty((0, len(self.knobs))))  # the block drawn last: its first step, and its signs
        self.exploring = False
        self.deaf = False  # whether a warning of a pass without a gradient was given
        self.seen: dict[int, Tensor] = {}  # by host, the sketch of this step's accumulated gradient
        self.renewed = False  # whether parameters were frozen or thawed in this window
        self.in_vain = 0  # such windows on end of which nothing was learned
        self.folding = GradientSketch(replicas.hosts, spec.sketch)
        self.held_out: Tensor | None = None  # the probe's losses where its gradient was last taken in this window
        self.given: Tensor | None = None  # the sketch of the gradient of the pass under way

    def open(self, window: Window) -> None:
        self.seen = {}
        self.held_out = None
        self._notice()
        self.levels.place(window, window.start, self.training)
        if self.half.any():
            self.record.open(partial(self._aim, window))
        self._spread(window, window.start)

    @property
    def needs_passes(self) -> str | None:
        # Asked from the first step on, also where knobs explore later: a loop without the blocks is told at once.
        explored = any(knob.spec.spread.width for knob in self.knobs)
        return "Contrast evidence observes each one's gradient there" if explored else None

    @property
    def pairs(self) -> bool:
        return self.spec.paired and self.exploring

    @property
    def watches(self) -> bool:
        return self.exploring

    @property
    def reads_on_entry(self) -> bool:
        return self.exploring and self.scene.replicas.hands_over

    def enter(self, replica: Replica, step: int) -> None:
        self.given = None
        if not self.reads_on_entry:
            return
        self._notice()
        folding = self.folding
        # As they are now: while backward goes on the optimizer may hold those of the loop, and its own groups.
        rates = [rate.clone() if isinstance(rate, Tensor) else rate for rate in self._rates(replica.host)]

        def take(numbers: Sequence[int], gradients: Sequence[Tensor]) -> None:
            self.given = folding.sketch.zeros() if self.given is None else self.given
            folding.fold_(self.given, numbers, gradients, rates)

        self.scene.replicas.observe(folding.parameters[replica.host], take)

    def exit(self, replica: Replica, step: int) -> None:
        if not self.exploring:
            return
        handed_over = self.scene.replicas.hands_over
        if not handed_over:
            self._notice()
        gradient = self.given if handed_over else self._added(replica)
        self.given = None
        if gradient is not None:
            self.record.add(replica, self.scene.replicas.unscaled(gradient), self.signs, self.half)
            return
        self.record.reject(replica)
        if not self.deaf:
            self.deaf = True
            warn(
                f"what the optimizer trains had no gradient in step {step}, so Contrast learns nothing of replica "
                f"{replica.index} from such steps: give the optimizer the parameters that the model has now; in a loop "
                f"written for the engine, call loss.backward() inside `with replica:` (said once)"
            )

    def miss(self, replica: Replica, step: int) -> None:
        if self.exploring:
            self.record.reject(replica)

    def _notice(self) -> None:
        """Start the record anew where parameters were frozen or thawed: all gradients are of the same parameters."""
        if self.folding.is_outdated():
            self.folding = GradientSketch(self.scene.replicas.hosts, self.spec.sketch)
            self.seen = {}
            self.renewed = True
            self.record.renew()

    def _rates(self, host: int) -> list[float | Tensor]:
        """The factors of gradients: traces hold each step's learning rates, dot products have them in v."""
        rates = self.folding.rates(host)
        return rates if self.spec.horizon else [1.0] * len(rates)

    def _added(self, replica: Replica) -> Tensor | None:
        """The sketch of what a pass has added to its model's gradients; `None` where the model has no gradient."""
        gradients = self.folding.gradients(replica.host)
        if gradients and all(gradient is None for gradient in gradients):
            return None
        total = self.folding.folded(gradients, self._rates(replica.host))
        # Micro-batches of one model, and accumulation, add to one gradient: this pass's part is the difference.
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
        self.training = float(harvest.losses[harvest.valid].mean())
        self.stateless = self.stateless or leaves_no_state(self.scene)
        heard = [k for k, half in enumerate(self.half) if half > 0.0]
        estimates = self.record.close(heard, self.half, partial(self._aim, harvest.window))
        if estimates:
            self.scene.unusable.told = False
        elif self.held_out is not None:
            self.scene.unusable.look_along(harvest.window.index, self.held_out, self.spec.kind)
        self._notice_in_vain(bool(heard) and not estimates)
        return self.levels.told(estimates, harvest)

    def _notice_in_vain(self, nothing_learned: bool) -> None:
        """Say it once where parameters are frozen or thawed so often that a record never fills."""
        renewed, self.renewed = self.renewed, False
        self.in_vain = self.in_vain + 1 if renewed and nothing_learned else 0
        if self.in_vain == IN_VAIN:
            names = " and ".join(knob.name for knob in self.knobs)
            warn(
                f"parameters were frozen or thawed in {IN_VAIN} windows on end, and each time what Contrast had "
                f"recorded of {names} began anew, so that nothing is learned of it: let each turn last for several "
                f"windows, or leave {names} out (said once)"
            )

    def _signs(self, window: Window, step: int) -> NDArray[np.float64]:
        """[N, K] signs of a step: its rows of its block; 0 for knobs that are not explored."""
        active = self._active(window, step)
        n = self.scene.replicas.size
        if not active.any():
            return np.zeros((n, len(self.knobs)))
        within = (step - window.start) % self.block_steps
        signs: NDArray[np.float64] = self._block(step - within)[within * n : (within + 1) * n] * active
        return signs

    def _block(self, first: int) -> NDArray[np.float64]:
        """[N * block_steps, K] signs of the block that begins with a step; each of its steps asks for them."""
        if self.drawn[0] != first:
            self.drawn = (first, self._draw(first))
        return self.drawn[1]

    def _draw(self, first: int) -> NDArray[np.float64]:
        names = [knob.name for knob in self.knobs]
        if self.spec.paired:
            return mirrored(len(self.ladder) // 2, seed=self.scene.seed, window=first, names=names)
        return self.design.assign(
            [self.ladder] * len(names), seed=self.scene.seed, window=first, names=names, two_level=[True] * len(names)
        )

    def _active(self, window: Window, step: int) -> NDArray[np.bool_]:
        """[K] which knobs are explored in a step; none in a block that the window's end would cut short."""
        end = step - (step - window.start) % self.block_steps + self.block_steps
        active: NDArray[np.bool_] = self.half > 0.0
        return active if self.record.ready and end <= window.stop else np.zeros_like(active)

    def _spread(self, window: Window, step: int) -> None:
        """Put the levels of a step in force; a knob that is not explored stays at its base."""
        self.window, self.step = window, step
        active, signs = self._active(window, step), self._signs(window, step)
        self.exploring, self.signs = bool(active.any()), signs
        for k, knob in enumerate(self.knobs):
            knob.spread(signs[:, k] * self.half[k], float(self.centre[k]) if active[k] else 0.0)

    def _aim(self, window: Window) -> Tensor | None:
        """v at the weights as they are; `None` before the optimizer has a state to read P from."""
        found = aim(self.scene, window.index, self.rate, stateless=self.stateless)
        if found is None:
            return None
        self.held_out = found.losses
        direction = self.folding.folded_trained(found.step)
        if self.scene.apart:
            self.scene.replicas.take_firsts([direction])
        return direction

    def forget(self) -> None:
        self.record.forget()
        self.levels.forget()

    def state_dict(self) -> dict[str, Any]:
        training = self.training if math.isfinite(self.training) else None
        levels = self.levels.state_dict()
        return {
            "record": self.record.state_dict(),
            "levels": levels,
            "training": training,
            "stateless": self.stateless,
            "step": self.step,
            "trained": self.folding.flags,
            "renewed": self.renewed,
            "in_vain": self.in_vain,
        }

    def load_state_dict(self, state: dict[str, Any], window: Window | None) -> None:
        self.training = math.nan if state["training"] is None else float(state["training"])
        self.stateless = state.get("stateless", False)  # states of older versions lack it
        self.levels.load_state_dict(state["levels"])
        self.open(self.window)  # again: which knobs are explored depends on the training loss
        # The loop may freeze or thaw parameters only after it has loaded: what was kept is of those trained then.
        trained = state.get("trained", self.folding.flags)  # states of older versions lack it
        if trained != self.folding.flags and len(trained) == len(self.folding.flags):
            self.folding = GradientSketch.as_trained(self.scene.replicas.hosts, self.spec.sketch, trained)
        renewed, in_vain = state.get("renewed", False), state.get("in_vain", 0)  # here, too
        if not isinstance(renewed, bool) or not isinstance(in_vain, int):
            raise CheckpointError(
                f"the checkpoint's number of windows of which Contrast learned nothing is {in_vain!r:.60}, and whether "
                f"other layers are trained since this one opened {renewed!r:.60}; resume from another one"
            )
        self.renewed, self.in_vain = renewed, in_vain
        sketch = self.folding.sketch
        self.record.load_state_dict(state["record"], sketch.device, sketch.size, window is not None)
        if window is not None:
            self._spread(window, state["step"])
