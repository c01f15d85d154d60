"""Contrast evidence: what a knob of the forward pass does to gradients, read without any replica diverging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from hdet.controllers import Estimate
from hdet.errors import StepError
from hdet.evidence.collector import Collector, Harvest, Scene, Window
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
    `rest`-th step explores, so that a knob whose best value is the bound pays next to nothing.

    Args:
        refresh: steps after which v is computed anew; each costs one gradient of the probe.
        rest: with the base on a bound, explore every rest-th step only.

    The width d_k is the knob's `spread.width`.
    """

    needs_probe: ClassVar[bool] = True
    sees: ClassVar[frozenset[str]] = frozenset({"forward"})

    refresh: int = Field(default=25, ge=1)
    rest: int = Field(default=8, ge=1)

    def collect(self, scene: Scene, knobs: Sequence[BoundKnob]) -> ContrastCollector:
        return ContrastCollector(self, scene, knobs)


class ContrastCollector(Collector):
    """Draws signs, measures each replica's gradient along v, and averages the contrasts over a window."""

    def __init__(self, spec: Contrast, scene: Scene, knobs: Sequence[BoundKnob]) -> None:
        super().__init__(scene, knobs)
        self.spec = spec
        n = scene.replicas.size
        # Rows of one design block: N replicas times as many steps as it takes to tell the knobs apart.
        self.block_steps = -(-max(SMALLEST_BLOCK, len(knobs) + 1) // n)
        rows = n * self.block_steps
        self.signs = TwoLevel(1.0).levels(rows)
        self.refresh = -(-spec.refresh // self.block_steps) * self.block_steps
        self.design = Hadamard()
        self.half = np.zeros(len(knobs))
        self.centre = np.zeros(len(knobs))
        self.stride = 1
        self.direction: Tensor | None = None
        self.step = 0
        self._clear()

    def _clear(self) -> None:
        self.exploring = False
        self.drawn: list[NDArray[np.float64]] = []  # [N, K] signs of each step that explored
        self.measured: list[Tensor] = []  # [local] <v, g_r> of the same steps
        self.shares: dict[int, Tensor] = {}
        self.totals: dict[int, Tensor] = {}

    def open(self, window: Window) -> None:
        self._clear()
        at_bound = False
        for k, knob in enumerate(self.knobs):
            down, up = knob.spec.space.room(knob.base(window.start), knob.spec.bounds)
            width = min(knob.spec.spread.width, (down + up) / 2)
            self.half[k] = width
            # About the base where there is room on both sides, else with one of the levels on the bound.
            self.centre[k] = max(0.0, width - down) - max(0.0, width - up)
            at_bound = at_bound or min(down, up) == 0.0
        self.stride = self.spec.rest if at_bound else 1
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
        found = {knob.name: Estimate.nothing() for knob in self.knobs}
        blocks = len(self.measured) // self.block_steps
        if blocks < 2:
            return found
        used = blocks * self.block_steps
        along = self.scene.replicas.gather(torch.stack(self.measured[:used], dim=1))  # [N, steps]
        signs = np.stack(self.drawn[:used])  # [steps, N, K]
        effects = -(signs * along.T[:, :, None]).mean(axis=1)  # [steps, K]
        effects = effects.reshape(blocks, self.block_steps, -1).mean(axis=1)
        effects = effects[np.isfinite(effects).all(axis=1)]
        if len(effects) < 2:
            return found
        slopes = effects.mean(axis=0) / self.half
        errors = effects.std(axis=0, ddof=1) / np.sqrt(len(effects)) / self.half
        return {
            knob.name: Estimate(slope=float(slope), stderr=float(error))
            for knob, slope, error in zip(self.knobs, slopes, errors, strict=True)
        }

    def _signs(self, window: Window, step: int) -> NDArray[np.float64]:
        """[N, K] signs of a step: its rows of the block it belongs to."""
        within = (step - window.start) % self.block_steps
        block = self.design.assign(
            [self.signs] * len(self.knobs),
            seed=self.scene.seed,
            window=step - within,
            names=[knob.name for knob in self.knobs],
            two_level=[True] * len(self.knobs),
        )
        n = self.scene.replicas.size
        return block[within * n : (within + 1) * n]

    def _spread(self, window: Window, step: int) -> None:
        """Put the levels of a step in force, or the base in a step that rests."""
        self.step = step
        block = (step - window.start) // self.block_steps
        self.exploring = self.direction is not None and block % self.stride == 0
        signs = self._signs(window, step) if self.exploring else np.zeros((self.scene.replicas.size, len(self.knobs)))
        for k, knob in enumerate(self.knobs):
            knob.spread(signs[:, k] * self.half[k], float(self.centre[k]) if self.exploring else 0.0)

    def _aim(self, window: Window) -> None:
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
            "step": self.step,
            "direction": self.direction,
            "measured": list(self.measured),
            "drawn": [signs.tolist() for signs in self.drawn],
        }

    def load_state_dict(self, state: dict[str, Any], window: Window | None) -> None:
        if window is None:
            return
        self.direction = state["direction"]
        self.measured = list(state["measured"])
        self.drawn = [np.asarray(signs, dtype=np.float64) for signs in state["drawn"]]
        self._spread(window, state["step"])


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
