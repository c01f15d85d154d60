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
from hdet.errors import StepError
from hdet.evidence.collector import Collector, Harvest, Scene, Window
from hdet.evidence.fit import along
from hdet.evidence.points import losses_at
from hdet.evidence.preconditioner import preconditioner
from hdet.hparams.bound import BoundKnob
from hdet.hparams.design import Hadamard
from hdet.hparams.evidence import Evidence
from hdet.hparams.spread import TwoLevel
from hdet.replicas import Replica, tensors
from hdet.replicas.tensors import evaluating
from hdet.signals.probe import checked
from hdet.spec import register

SMALLEST_BLOCK = 4
FEWEST_BLOCKS = 8


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

    Near a bound both levels lie inside it, one of them on the bound. With the base on the bound, only every
    `rest`-th block explores, so that a knob whose best value is the bound pays next to nothing.

    A knob that also acts in eval mode (a temperature) changes the probe itself, besides what is learned: to the
    slope of the window's T steps, T mean_t(h), is added that of the probe between the two levels at the window's
    last weights. An estimate needs at least 8 blocks; windows with fewer save them up.

    The standard error is that of the training gradients along a given v. The probe's own noise is in v: a probe
    much smaller than a training batch gives a surer estimate than it should.

    Args:
        refresh: steps after which v is computed anew; each costs one gradient of the probe.
        rest: with the base on a bound, explore in every rest-th block only.

    The width d_k is the knob's `spread.width`. Under a GradScaler slopes are multiplied by its scale, t is not.
    """

    needs_probe: ClassVar[bool] = True
    shared: ClassVar[bool] = True
    sees: ClassVar[frozenset[str]] = frozenset({"forward"})

    refresh: int = Field(default=50, ge=1)
    rest: int = Field(default=8, ge=1)

    def collect(self, scene: Scene, knobs: Sequence[BoundKnob]) -> ContrastCollector:
        return ContrastCollector(self, scene, knobs)


class ContrastCollector(Collector):
    """Draws signs, measures each replica's gradient along v, and averages the contrasts over blocks."""

    def __init__(self, spec: Contrast, scene: Scene, knobs: Sequence[BoundKnob]) -> None:
        super().__init__(scene, knobs)
        self.spec = spec
        n = scene.replicas.size
        # Rows of one design block: N replicas times as many steps as it takes to tell the knobs apart.
        self.block_steps = -(-max(SMALLEST_BLOCK, len(knobs) + 1) // n)
        self.ladder = TwoLevel(1.0).levels(n * self.block_steps)
        self.refresh = -(-spec.refresh // self.block_steps) * self.block_steps
        self.design = Hadamard()
        self.half = np.zeros(len(knobs))
        self.centre = np.zeros(len(knobs))
        self.stride = np.ones(len(knobs), dtype=np.int64)
        self.saved: list[list[float]] = [[] for _ in knobs]  # slopes of blocks that no estimate has used yet
        self.direction: Tensor | None = None
        self.step = 0
        self._clear()

    def _clear(self) -> None:
        self.exploring = False
        self.drawn: list[NDArray[np.float64]] = []  # [N, K] signs of each step that explored, 0 for a knob that rested
        self.measured: list[Tensor] = []  # [local] <v, g_r> of the same steps
        self.shares: dict[int, Tensor] = {}
        self.totals: dict[int, Tensor] = {}

    def open(self, window: Window) -> None:
        self._clear()
        for k, knob in enumerate(self.knobs):
            down, up = knob.spec.space.room(knob.base(window.start), knob.spec.bounds)
            heard = knob.controller.listens(window.stop, window.total_steps)
            width = min(knob.spec.spread.width, (down + up) / 2) if heard else 0.0
            self.half[k] = width
            # About the base where there is room on both sides, else with one of the levels on the bound.
            self.centre[k] = max(0.0, width - down) - max(0.0, width - up)
            self.stride[k] = self.spec.rest if min(down, up) == 0.0 else 1
        self._aim(window)
        self._spread(window, window.start)

    def exit(self, replica: Replica, step: int) -> None:
        if not self.exploring or self.direction is None:
            return
        flat = torch.cat([_gradient(p).flatten() for p in tensors.trained(replica.model)])
        total = torch.dot(flat.to(self.direction.dtype), self.direction)
        # Seats of one model, and accumulation, add to one gradient: what this pass added is its own.
        added = total - self.totals[replica.host] if replica.host in self.totals else total
        self.totals[replica.host] = total
        self.shares[replica.index] = self.shares.get(replica.index, 0.0) + added

    def after_update(self, window: Window, step: int) -> None:
        if self.exploring:
            if len(self.shares) != len(self.scene.replicas.local):
                raise StepError(
                    f"{len(self.shares)} of {len(self.scene.replicas.local)} replicas ran inside `with replica:` in "
                    f"step {step}; Contrast evidence observes each one's gradient there"
                )
            self.measured.append(torch.stack([self.shares[r.index] for r in self.scene.replicas.local]))
            self.drawn.append(self._signs(window, step))
        self.shares, self.totals = {}, {}
        if step + 1 < window.stop:
            if (step + 1 - window.start) % self.refresh == 0:
                self._aim(window)
            self._spread(window, step + 1)

    def close(self, harvest: Harvest) -> dict[str, Estimate]:
        blocks = len(self.measured) // self.block_steps
        if blocks:
            self._save(blocks)
        found = {knob.name: Estimate.nothing() for knob in self.knobs}
        sure = [k for k, slopes in enumerate(self.saved) if len(slopes) >= FEWEST_BLOCKS]
        direct = self._direct([k for k in sure if self.knobs[k].spec.acts_in_eval], harvest)
        steps = harvest.window.stop - harvest.window.start
        for k in sure:
            slopes = np.array(self.saved[k])
            slope, stderr = float(slopes.mean()), float(slopes.std(ddof=1) / np.sqrt(len(slopes)))
            if k in direct:
                slope, stderr = steps * slope + direct[k].slope, math.hypot(steps * stderr, direct[k].stderr)
            found[self.knobs[k].name] = Estimate(slope=slope, stderr=stderr, offset=float(self.centre[k]))
            self.saved[k] = []
        return found

    def _save(self, blocks: int) -> None:
        """Work out each block's slope for each knob that explored in it."""
        used = blocks * self.block_steps
        along = self.scene.replicas.gather(torch.stack(self.measured[:used], dim=1))  # [N, steps]
        signs = np.stack(self.drawn[:used])  # [steps, N, K]
        products = (signs * along.T[:, :, None]).sum(axis=1).reshape(blocks, self.block_steps, -1).sum(axis=1)
        squares = (signs**2).sum(axis=1).reshape(blocks, self.block_steps, -1).sum(axis=1)  # [blocks, K]
        for k, half in enumerate(self.half):
            heard = (squares[:, k] > 0.0) & np.isfinite(products[:, k])
            if half > 0.0:
                self.saved[k] += (-products[heard, k] / squares[heard, k] / half).tolist()

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
        """[N, K] signs of a step: its rows of the block it belongs to, 0 for knobs that rest in this block."""
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
        """[K] which knobs explore in the block that a step belongs to."""
        block = (step - window.start) // self.block_steps
        active: NDArray[np.bool_] = (block % self.stride == 0) & (self.half > 0.0)
        return active if self.direction is not None else np.zeros_like(active)

    def _spread(self, window: Window, step: int) -> None:
        """Put the levels of a step in force; a knob that rests is at its base."""
        self.step = step
        active, signs = self._active(window, step), self._signs(window, step)
        self.exploring = bool(active.any())
        for k, knob in enumerate(self.knobs):
            knob.spread(signs[:, k] * self.half[k], float(self.centre[k]) if active[k] else 0.0)

    def _aim(self, window: Window) -> None:
        """v = P g_p at the weights as they are; `None` before the optimizer has a state to read P from."""
        if not self.half.any():
            self.direction = None
            return
        model, optimizer = self.scene.replicas.hosts[0]
        own = tensors.trained(model)
        scales: dict[int, Tensor | float] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                scale = preconditioner(optimizer, group, parameter)
                if scale is not None:
                    scales[id(parameter)] = scale
                elif not optimizer.state:
                    self.direction = None
                    return
                # Else it has never had a gradient, as the rest of the optimizer has: nothing moves it.
        probe = self.scene.probe
        with self.scene.at_base(), evaluating(model, optimizer), torch.enable_grad():
            losses = torch.cat(checked([probe.loss(model, batch) for batch in probe.draw(window.index)]))
            gradients = torch.autograd.grad(losses.mean(), own, allow_unused=True)
        parts = [
            torch.zeros_like(parameter) if gradient is None else gradient * scales.get(id(parameter), 0.0)
            for parameter, gradient in zip(own, gradients, strict=True)
        ]
        self.direction = torch.cat([part.detach().flatten().float() for part in parts])

    def state_dict(self) -> dict[str, Any]:
        return {
            "saved": [list(slopes) for slopes in self.saved],
            "step": self.step,
            "direction": self.direction,
            "measured": list(self.measured),
            "drawn": [signs.tolist() for signs in self.drawn],
        }

    def load_state_dict(self, state: dict[str, Any], window: Window | None) -> None:
        self.saved = [list(slopes) for slopes in state["saved"]]
        if window is None:
            return
        device = next(iter(tensors.trained(self.scene.replicas.hosts[0][0]))).device
        direction = state["direction"]
        self.direction = None if direction is None else direction.to(device, copy=True)
        self.measured = [row.to(device, copy=True) for row in state["measured"]]
        self.drawn = [np.asarray(signs, dtype=np.float64) for signs in state["drawn"]]
        self._spread(window, state["step"])


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
