"""Where the held-out loss would have the weights go, in the units in which the optimizer moves them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hdet.evidence.parts.preconditioner import preconditioner
from hdet.evidence.scene import Scene
from hdet.replicas import gradients, tensors
from hdet.replicas.tensors import evaluating
from hdet.signals.probe import checked, flat


@dataclass(frozen=True)
class Aim:
    """The gradient g_p of the mean probe loss at the weights as they are, and v = P g_p.

    Attributes:
        gradient, step: g_p and v for each of `tensors.trained`, in float32 at least; of sharded ones this rank's part.
        loss: the mean probe loss, 0-dim.
    """

    gradient: list[Tensor]
    step: list[Tensor]
    loss: Tensor


def aim(scene: Scene, window: int, rate: float | None = None) -> Aim | None:
    """One gradient of the probe, every knob at its base; `None` before the optimizer has a state to read P from.

    Args:
        rate: in place of each group's learning rate in P.
    """
    model, optimizer = scene.replicas.hosts[0]
    scales: dict[int, Tensor | float] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            scale = preconditioner(optimizer, group, parameter, rate)
            if scale is not None:
                scales[id(parameter)] = scale
            elif not optimizer.state:
                return None
            # Else it has never had a gradient, as the rest of the optimizer has: nothing moves it.
    losses: list[Tensor] = []

    def each() -> Iterator[Tensor]:
        for batch in scene.probe.draw(window):
            loss = flat(scene.probe.loss(model, batch))
            losses.append(loss.detach())
            yield loss.sum()

    with scene.at_base(), evaluating(model, optimizer), torch.enable_grad():
        gradient = gradients.summed(model, each())
    known = torch.cat(checked(losses))
    gradient = list(torch._foreach_div(gradient, float(known.numel())))
    own = tensors.trained(model)
    step = [part * scales.get(id(parameter), 0.0) for parameter, part in zip(own, gradient, strict=True)]
    return Aim(gradient, step, known.double().mean())
