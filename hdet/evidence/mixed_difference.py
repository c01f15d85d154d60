"""Mixed difference: what a knob of the forward pass does to gradients, read from forward passes alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from hdet.controllers import Controller, Estimate
from hdet.errors import ConfigError
from hdet.evidence.collector import Collector, Evidence
from hdet.evidence.parts.probe_gradient import aim, leaves_no_state
from hdet.evidence.parts.two_levels import Levels
from hdet.evidence.scene import Harvest, Scene, Window
from hdet.hparams.bound_knob import BoundKnob
from hdet.hparams.forward import ModuleKnob
from hdet.hparams.knob import Knob
from hdet.replicas import Replicas, tensors
from hdet.replicas.dense import can_be_written, unwritten
from hdet.replicas.generators import numbers_lent
from hdet.replicas.random_numbers import accelerators
from hdet.replicas.written_buffers import attributes_kept, frozen_kept
from hdet.spec import register

ENDS = (1.0, -1.0)
LEAST_FELT = 1e-4


@register
class MixedDifference(Evidence):
    """The mixed second difference of the training loss, in a knob and along the gradient of the held-out loss.

    It measures what `Contrast` does, where that cannot look: on parameters sharded over ranks no replica ever sees its
    own whole gradient. With g_p the gradient of the probe loss at the shared weights theta and v = P g_p, P the
    optimizer's diagonal preconditioner, a knob's effect on the next step's held-out loss is

        h = -<v, g(u + d) - g(u - d)> / 2
          = -[L(theta + e v; u + d) - L(theta - e v; u + d) - L(theta + e v; u - d) + L(theta - e v; u - d)] / (4 e)

    up to O(e^2). L is the training loss in training mode, on one training batch and with the same random numbers in
    all four forward passes. At a window's end it is taken on J batches of the engine's `objective`, at the window's
    last weights; slope h / d and standard error are over them, a slope of one step as `Contrast`'s without a horizon.
    In training itself nothing is explored: all replicas stay at the base, and what shares or shards their gradients is
    left alone. v leaves out weights that training does not feel: those whose 1 / P is below 1e-4 of the mean.

    A window costs one gradient of the probe and 4 J forward passes for each knob that listens, which are shared out
    over the replicas. Knobs near a bound, and knobs that also act in eval mode, are treated as by `Contrast`, and the
    standard error means what it does there. docs/evidence.md says more, of the distance e too.

    Args:
        every: measure in every so many windows only; the others tell nothing.
        change: of the held-out loss along e v, as a share of it, to first order. Arithmetic in bfloat16 wants 0.03.
        reach: largest |e v| over the norm of the trained weights.
        bound_from: share of the run before which a base on a bound is not looked at; later it is where held-out loss
            exceeds training loss.

    The width d is the knob's `spread.width`.
    """

    needs_probe: ClassVar[bool] = True
    needs_objective: ClassVar[bool] = True
    shared: ClassVar[bool] = True
    sees: ClassVar[frozenset[str]] = frozenset({"forward"})

    every: int = Field(default=1, ge=1)
    change: float = Field(default=0.01, gt=0, le=0.5)
    reach: float = Field(default=0.03, gt=0, le=1)
    bound_from: float = Field(default=0.3, ge=0, le=1)

    def collect(self, scene: Scene, knobs: Sequence[BoundKnob]) -> MixedDifferenceCollector:
        return MixedDifferenceCollector(self, scene, knobs)

    def default_controller(self, knob: Knob) -> Controller:
        default = super().default_controller(knob)
        # What `Contrast` remembers in its traces the controller has to, since each window is judged alone here.
        return default.replace(memory=0.7) if isinstance(knob, ModuleKnob) else default


class MixedDifferenceCollector(Collector):
    """Does nothing while the replicas train; at a window's end it evaluates the objective at four points a batch."""

    def __init__(self, spec: MixedDifference, scene: Scene, knobs: Sequence[BoundKnob]) -> None:
        super().__init__(scene, knobs)
        _refuse_complex(scene.replicas)
        _alone(scene.replicas)
        self.spec = spec
        self.levels = Levels(scene, self.knobs, spec.bound_from)

    def close(self, harvest: Harvest) -> dict[str, Estimate]:
        window = harvest.window
        if (window.index + 1) % self.spec.every:
            return self.levels.told({}, harvest)
        replicas = self.scene.replicas
        replicas.mean_buffers(harvest.valid.tolist())
        live = self.scene.moving.values()
        apart = tensors.substituted(live, self.scene.weights(harvest.valid)) if self.scene.apart else nullcontext()
        with apart:
            self.levels.place(window, window.stop - 1, float(harvest.losses[harvest.valid].mean()))
            heard = np.flatnonzero(self.levels.half).tolist()
            return self.levels.told(self._measured(heard, harvest) if heard else {}, harvest)

    def forget(self) -> None:
        self.levels.forget()

    def state_dict(self) -> dict[str, Any]:
        return {"levels": self.levels.state_dict()}

    def load_state_dict(self, state: dict[str, Any], window: Window | None) -> None:
        self.levels.load_state_dict(state["levels"])

    def _measured(self, heard: Sequence[int], harvest: Harvest) -> dict[int, Estimate]:
        """Slopes of one step by the knobs' numbers; none where there is no direction to look along."""
        found = aim(self.scene, harvest.window.index, stateless=leaves_no_state(self.scene))
        if found is None:
            return {}
        self.scene.unusable.look_along(harvest.window.index, found.losses, self.spec.kind)
        gradient = [found.gradient(number) for number in range(len(found.sums))]
        step = [found.step(number) for number in range(len(found.sums))]
        if self.scene.apart:
            self.scene.replicas.take_firsts(step)  # the moments of each are its own
        self._leave_out_unfelt(gradient, step)
        distance = self._distance(gradient, step, found.loss)
        if distance == 0.0:
            return {}
        del found, gradient  # their memory, before the weights are copied
        torch._foreach_mul_(step, distance)
        losses = self._losses(heard, step, harvest)
        change = (losses[..., 0, :] - losses[..., 1, :]) / (2.0 * distance)  # [heard, J, 2]: <v, g> at both levels
        widths = self.levels.half[heard][:, None]
        slopes = -(change[..., 0] - change[..., 1]) / (2.0 * widths)
        estimates = {}
        for k, own in zip(heard, slopes, strict=True):
            if np.isfinite(own).all():
                estimates[k] = Estimate.of_sub_batches(own)
        return estimates

    def _put_back(self, buffers: HeldBuffers) -> None:
        buffers.put_back()
        for knob in self.knobs:
            knob.forget()  # the buffer that it is may hold its base again

    def _leave_out_unfelt(self, gradient: Sequence[Tensor], step: Sequence[Tensor]) -> None:
        """Set v to 0 where the training loss, by the optimizer's own account, does not depend on a weight."""
        inverse = [(g / v).abs().nan_to_num_(0.0, 0.0) for g, v in zip(gradient, step, strict=True)]
        scale, known = self._sums([inverse, ((part > 0.0).to(part.dtype) for part in inverse)])
        for part, own in zip(inverse, step, strict=True):
            own.masked_fill_(part < LEAST_FELT * scale / max(known, 1.0), 0.0)

    def _sums(self, lists: Sequence[Iterable[Tensor]], *numbers: Tensor) -> list[float]:
        """The sum of each list's elements, over the ranks of a replica too, and further numbers, alike everywhere."""
        replicas = self.scene.replicas
        parts = [tensors.pieces(parameter) for parameter in tensors.trained(replicas.hosts[0][0])]
        sums = [torch.stack([t.sum() * n for t, n in zip(own, parts, strict=True)]).sum() for own in lists]
        row = torch.stack([number.double() for number in (*sums, *numbers)])
        # Of sharded parameters each rank sees one piece; a replica's number is the mean over its ranks.
        told: list[float] = replicas.gather(row.expand(len(replicas.local), -1))[0].tolist()
        return told

    def _distance(self, gradient: Sequence[Tensor], step: Sequence[Tensor], loss: Tensor) -> float:
        """e, the same on every process; 0 where the probe's gradient says nothing."""
        own = tensors.trained(self.scene.replicas.hosts[0][0])
        held = [tensors.wide(tensors.local(parameter.detach())) for parameter in own]
        pairs = ((step, gradient), (step, step), (held, held))
        products = [(a * b for a, b in zip(*pair, strict=True)) for pair in pairs]
        rise, length, weights, level = self._sums(products, loss)
        if not (math.isfinite(rise) and rise != 0.0 and length > 0.0):
            return 0.0
        furthest = self.spec.reach * math.sqrt(weights / length) if weights > 0.0 else math.inf
        return min(self.spec.change * abs(level / rise), furthest)

    @torch.no_grad()
    def _losses(self, heard: Sequence[int], step: Sequence[Tensor], harvest: Harvest) -> NDArray[np.float64]:
        """[heard, J, 2, 2] training losses at theta +- step (third axis) and at the levels u +- d (fourth).

        Every batch and knob falls to one replica, which makes all four passes. All that a pass changes, weights (frozen
        ones but for the first time, `frozen_kept`), buffers, states kept as plain attributes, modes and random number
        generators, is put back before the next.
        """
        scene, window, objective = self.scene, harvest.window, self.scene.objective
        assert objective is not None
        replicas, model = scene.replicas, scene.replicas.hosts[0][0]
        batches = objective.draw(window.index)
        tasks = [(k, j) for k in heard for j in range(len(batches))]
        live = [tensors.local(parameter.detach()) for parameter in tensors.trained(model)]
        saved, devices, modules = tensors.clones(live), accelerators(model), list(model.modules())
        device = next(iter(live)).device
        table = torch.zeros(len(replicas.local), len(tasks), 2, 2, dtype=torch.float64, device=device)
        with scene.at_base(), tensors.training(model):
            buffers = HeldBuffers(model)  # with the bases of knobs that are buffers themselves
            as_before = unwritten([*live, *buffers.copied])
            try:
                for end, sign in enumerate(ENDS):
                    tensors.reshard(model)
                    for parameter, start, way in zip(live, saved, step, strict=True):
                        parameter.copy_(torch.add(start, way, alpha=sign))
                    for row, replica in enumerate(replicas.local):
                        for number in range(replica.index, len(tasks), replicas.size):
                            k, j = tasks[number]
                            for side, level in enumerate(ENDS):
                                offset = float(self.levels.centre[k] + level * self.levels.half[k])
                                self.levels.write(window.stop - 1, k, offset)
                                pair = f"{scene.seed}:{window.index}:{self.knobs[k].name}:{j}"
                                with (
                                    numbers_lent(pair, devices, *modules),
                                    attributes_kept(modules),
                                    frozen_kept(modules),
                                ):
                                    table[row, number, end, side] = objective.evaluate(model, batches[j])
                                self._put_back(buffers)
            finally:
                tensors.reshard(model)
                with as_before:
                    tensors.copy_(live, saved)
                    self._put_back(buffers)
        # Each task was done by one replica and is zero in the other rows.
        losses: NDArray[np.float64] = replicas.gather(table.flatten(start_dim=1)).sum(axis=0)
        return losses.reshape(len(heard), len(batches), 2, 2)


def _refuse_complex(replicas: Replicas) -> None:
    """A complex weight's two parts have scales of their own in an optimizer, and P is one factor for both.

    Raises:
        ConfigError: the model has complex parameters.
    """
    if any(parameter.is_complex() for parameter in tensors.trained(replicas.hosts[0][0])):
        raise ConfigError(
            "the model has complex parameters, along which MixedDifference evidence cannot look; leave knobs of the "
            'forward pass out, as by exclude=["dropout", "label_smoothing"]'
        )


def _alone(replicas: Replicas) -> None:
    """Each replica passes over batches of its own, as many as fall to it: ranks that meet in one would wait forever.

    Raises:
        ConfigError: the model has layers that meet in training mode.
    """
    model = replicas.hosts[0][0]
    met = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if met and len(replicas.local) < replicas.size:
        raise ConfigError(
            f"MixedDifference evidence runs forward passes on each replica by itself, and {met[0]!r} is a "
            f"SyncBatchNorm, which waits for the other ranks in each; use BatchNorm, whose statistics are merged at a "
            f"window's end, or evidence=hdet.evidence.Contrast()"
        )


class HeldBuffers:
    """Copies of all buffers of a model, its own or not in its `state_dict`.

    A forward pass may write into a buffer (batch statistics) or replace it by another tensor; both are undone, but for
    writes into what cannot be written over, as an expanded or a sparse one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held = [
            (module, name, buffer, buffer.detach().clone() if can_be_written(tensors.local(buffer)) else None)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    @property
    def copied(self) -> list[Tensor]:
        """Those whose values are put back."""
        return [buffer for _, _, buffer, value in self._held if value is not None]

    @torch.no_grad()
    def put_back(self) -> None:
        """Every buffer is the tensor that it was, with the values that it had."""
        for module, name, buffer, value in self._held:
            module._buffers[name] = buffer
            if value is not None:
                buffer.copy_(value)
