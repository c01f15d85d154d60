"""Contrast evidence: what a knob of the forward pass does to gradients, read without any replica diverging."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from hdet.controllers import Estimate
from hdet.evidence.collector import Collector, Harvest, Scene, Window
from hdet.evidence.fit import along
from hdet.evidence.points import losses_at
from hdet.evidence.preconditioner import preconditioner
from hdet.evidence.record import Dots, Record, Traces
from hdet.hparams.bound import BoundKnob
from hdet.hparams.design import Hadamard
from hdet.hparams.evidence import Evidence
from hdet.hparams.spread import TwoLevel
from hdet.replicas import Replica, tensors
from hdet.replicas.tensors import evaluating
from hdet.signals.probe import checked
from hdet.spec import register

SMALLEST_BLOCK = 4
MARGIN = 0.02


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
    by the held-out loss of now. This takes `groups` parameter-sized buffers a knob that explores; without, one.

    Near a bound both levels lie inside it, one of them on the bound. Exploring costs something there if the bound is
    best, as no dropout is on data that never repeat. So a base on its bound is not explored before `bound_from`, and
    then only in windows where the held-out loss lies above the training loss of the window before: by two standard
    errors and 2 %. (Knobs that also act in eval mode are no regularisers, and explore.)

    A knob that also acts in eval mode (a temperature) changes the probe itself, besides what is learned: to the
    slope of the window's T steps, T mean_t(h), is added that of the probe between the two levels at the window's
    last weights. An estimate needs at least 8 blocks; windows with fewer save them up.

    The standard error is that of the training gradients along a given v. The probe's own noise is in v: a probe
    much smaller than a training batch gives a surer estimate than it should.

    Args:
        horizon: steps over which contrasts are remembered; 0 for those of one window only, by dot products.
        groups: of blocks, whose scatter gives the standard error with a horizon.
        refresh: without a horizon, steps after which v is computed anew; each costs one gradient of the probe.
        bound_from: share of the run before which a base on a bound is not explored. Networks that have learnt little
            want no regularisation; it is no use to ask them.

    The width d_k is the knob's `spread.width`. Under a GradScaler slopes are multiplied by its scale, t is not.
    """

    needs_probe: ClassVar[bool] = True
    shared: ClassVar[bool] = True
    sees: ClassVar[frozenset[str]] = frozenset({"forward"})

    horizon: int = Field(default=0, ge=0)
    groups: int = Field(default=8, ge=2, le=64)
    refresh: int = Field(default=50, ge=1)
    bound_from: float = Field(default=0.3, ge=0, le=1)

    def collect(self, scene: Scene, knobs: Sequence[BoundKnob]) -> ContrastCollector:
        return ContrastCollector(self, scene, knobs)


class ContrastCollector(Collector):
    """Draws signs, passes each replica's gradient to a record, and says which knobs explore when."""

    def __init__(self, spec: Contrast, scene: Scene, knobs: Sequence[BoundKnob]) -> None:
        super().__init__(scene, knobs)
        self.spec = spec
        replicas = scene.replicas
        # Rows of one design block: N replicas times as many steps as it takes to tell the knobs apart.
        self.block_steps = -(-max(SMALLEST_BLOCK, len(knobs) + 1) // replicas.size)
        self.ladder = TwoLevel(1.0).levels(replicas.size * self.block_steps)
        self.design = Hadamard()
        self.half = np.zeros(len(knobs))
        self.centre = np.zeros(len(knobs))
        self.record: Record = (
            Traces(replicas, len(knobs), self.block_steps, spec.horizon, spec.groups, replicas.hosts[0][1])
            if spec.horizon
            else Dots(replicas, len(knobs), self.block_steps, spec.refresh)
        )
        self.training = math.nan  # mean training loss of the last window
        self.step = 0
        self.exploring = False
        self.seen: dict[int, Tensor] = {}  # by host, the gradient that has gathered in this step

    def open(self, window: Window) -> None:
        self.seen = {}
        bound = [k for k, knob in enumerate(self.knobs) if 0.0 in self._room(knob, window)]
        left = set(bound) if bound and self._rests(window) else set()
        for k, knob in enumerate(self.knobs):
            down, up = self._room(knob, window)
            heard = knob.controller.listens(window.stop, window.total_steps)
            rests = k in left and not knob.spec.acts_in_eval
            width = min(knob.spec.spread.width, (down + up) / 2) if heard and not rests else 0.0
            self.half[k] = width
            # About the base where there is room on both sides, else with one of the levels on the bound.
            self.centre[k] = max(0.0, width - down) - max(0.0, width - up)
        if self.half.any():
            self.record.open(partial(self._aim, window))
        self._spread(window, window.start)

    def _room(self, knob: BoundKnob, window: Window) -> tuple[float, float]:
        return knob.spec.space.room(knob.base(window.start), knob.spec.bounds)

    def _rests(self, window: Window) -> bool:
        """Whether regularisers on their bounds are left alone in this window: nothing says that they are needed."""
        early = window.total_steps is not None and window.start < self.spec.bound_from * window.total_steps
        if early or not math.isfinite(self.training):
            return True
        model, optimizer = self.scene.replicas.hosts[0]
        with self.scene.at_base():
            measured = self.scene.probe.measure(model, window.index, optimizer)
        # Every process goes by the first one's reading: those of others may differ in the last bits.
        held_out = self.scene.replicas.gather(measured.expand(len(self.scene.replicas.local), -1))[0]
        error = float(held_out.std(ddof=1)) / math.sqrt(len(held_out))
        gap = float(held_out.mean()) - self.training
        return not gap > 2.0 * error + MARGIN * abs(self.training)

    def exit(self, replica: Replica, step: int) -> None:
        if not self.exploring:
            return
        flat = torch.cat([_gradient(p).flatten() for p in tensors.trained(replica.model)])
        # Seats of one model, and accumulation, add to one gradient: what this pass added is its own.
        own = flat - self.seen[replica.host] if replica.host in self.seen else flat
        self.seen[replica.host] = flat
        self.record.add(replica, own, self._signs(self.window, step), self.half)

    def after_update(self, window: Window, step: int) -> None:
        last = step + 1 == window.stop
        self.record.end_step(step, self._signs(window, step) if self.exploring else None, last)
        self.seen = {}
        if not last:
            self._spread(window, step + 1)

    def close(self, harvest: Harvest) -> dict[str, Estimate]:
        window = harvest.window
        heard_losses = harvest.losses[harvest.valid]
        self.training = float(heard_losses.mean())
        heard = [k for k, half in enumerate(self.half) if half > 0.0]
        estimates = self.record.close(heard, self.half, partial(self._aim, window))
        found = {knob.name: Estimate.nothing() for knob in self.knobs}
        direct = self._direct([k for k in estimates if self.knobs[k].spec.acts_in_eval], harvest)
        steps = window.stop - window.start
        for k, estimate in estimates.items():
            slope, stderr = estimate.slope, estimate.stderr
            if k in direct:
                slope, stderr = steps * slope + direct[k].slope, math.hypot(steps * stderr, direct[k].stderr)
            found[self.knobs[k].name] = Estimate(slope=slope, stderr=stderr, offset=float(self.centre[k]))
        return found

    def _direct(self, numbers: Sequence[int], harvest: Harvest) -> dict[int, Estimate]:
        """What some knobs do to the probe itself, between their two levels at the weights as they are."""
        points: list[Callable[[], list[Tensor]]] = []
        for k in numbers:
            ends = (self.centre[k] - self.half[k], self.centre[k] + self.half[k])
            points += [partial(self._displaced, k, float(end), harvest.window.stop - 1) for end in ends]
        if not points:
            return {}
        with self.scene.at_base():
            losses = losses_at(self.scene.replicas, self.scene.probe, harvest, points)
        pairs = losses.reshape(len(numbers), 2, -1)
        return {k: along((-self.half[k], self.half[k]), pair) for k, pair in zip(numbers, pairs, strict=True)}

    def _displaced(self, number: int, offset: float, step: int) -> list[Tensor]:
        """The parameters as they are; as a side effect one knob is off its base and the others at theirs."""
        for k, knob in enumerate(self.knobs):
            value = knob.displaced(step, offset if k == number else 0.0)
            for host in range(len(self.scene.replicas.hosts)):
                knob.write(host, value)
        return tensors.clones(tensors.parameters(self.scene.replicas.hosts[0][0]))

    def _signs(self, window: Window, step: int) -> NDArray[np.float64]:
        """[N, K] signs of a step: its rows of the block it belongs to, 0 for knobs that rest."""
        active = self._active(window, step)
        n = self.scene.replicas.size
        if not active.any():
            return np.zeros((n, len(self.knobs)))
        within = (step - window.start) % self.block_steps
        drawn = self.design.assign(
            [self.ladder] * len(self.knobs),
            seed=self.scene.seed,
            window=step - within,
            names=[knob.name for knob in self.knobs],
            two_level=[True] * len(self.knobs),
        )
        signs: NDArray[np.float64] = drawn[within * n : (within + 1) * n] * active
        return signs

    def _active(self, window: Window, step: int) -> NDArray[np.bool_]:
        """[K] which knobs explore in a step; none in a block that the window's end would cut short."""
        end = step - (step - window.start) % self.block_steps + self.block_steps
        active: NDArray[np.bool_] = self.half > 0.0
        return active if self.record.ready and end <= window.stop else np.zeros_like(active)

    def _spread(self, window: Window, step: int) -> None:
        """Put the levels of a step in force; a knob that rests is at its base."""
        self.window, self.step = window, step
        active, signs = self._active(window, step), self._signs(window, step)
        self.exploring = bool(active.any())
        for k, knob in enumerate(self.knobs):
            knob.spread(signs[:, k] * self.half[k], float(self.centre[k]) if active[k] else 0.0)

    def _aim(self, window: Window) -> Tensor | None:
        """v = P g_p at the weights as they are; `None` before the optimizer has a state to read P from."""
        model, optimizer = self.scene.replicas.hosts[0]
        own = tensors.trained(model)
        scales: dict[int, Tensor | float] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                scale = preconditioner(optimizer, group, parameter)
                if scale is not None:
                    scales[id(parameter)] = scale
                elif not optimizer.state:
                    return None
                # Else it has never had a gradient, as the rest of the optimizer has: nothing moves it.
        probe = self.scene.probe
        with self.scene.at_base(), evaluating(model, optimizer), torch.enable_grad():
            losses = torch.cat(checked([probe.loss(model, batch) for batch in probe.draw(window.index)]))
            gradients = torch.autograd.grad(losses.mean(), own, allow_unused=True)
        parts = [
            torch.zeros_like(parameter) if gradient is None else gradient * scales.get(id(parameter), 0.0)
            for parameter, gradient in zip(own, gradients, strict=True)
        ]
        return torch.cat([part.detach().flatten().float() for part in parts])

    def forget(self) -> None:
        self.record.forget()

    def state_dict(self) -> dict[str, Any]:
        training = self.training if math.isfinite(self.training) else None
        return {"record": self.record.state_dict(), "training": training, "step": self.step}

    def load_state_dict(self, state: dict[str, Any], window: Window | None) -> None:
        self.training = math.nan if state["training"] is None else float(state["training"])
        self.open(self.window)  # once more: who rests depends on the training loss
        device = next(iter(tensors.trained(self.scene.replicas.hosts[0][0]))).device
        self.record.load_state_dict(state["record"], device, window is not None)
        if window is not None:
            self._spread(window, state["step"])


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
