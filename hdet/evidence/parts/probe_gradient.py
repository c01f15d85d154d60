"""Where the held-out loss would have the weights go, in the units in which the optimizer moves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import SGD

from hdet.evidence.parts.preconditioner import keeps_nothing, preconditioner
from hdet.evidence.scene import Scene
from hdet.replicas import gradients, tensors
from hdet.replicas.chained_optimizer import chained
from hdet.signals.probe import checked, differentiable, flat


@dataclass(frozen=True)
class Aim:
    """The gradient g_p of the mean probe loss at the weights as they are, and how the optimizer scales it, P.

    Attributes:
        sums: of the gradients over the probe's losses, for each of `tensors.trained`, in its own dtype; of sharded
            ones this rank's part.
        losses: how many there are.
        scale: of one of them, by its place, P.
        loss: the mean probe loss, 0-dim.
    """

    sums: list[Tensor]
    losses: int
    scale: Callable[[int, slice | None], Tensor | float]
    loss: Tensor

    def gradient(self, number: int, elements: slice | None = None) -> Tensor:
        """g_p of one of `tensors.trained`, or of some of its elements as of a vector, in float32 at least."""
        own = self.sums[number] if elements is None else self.sums[number].reshape(-1)[elements]
        return tensors.wide(own) / float(self.losses)

    def step(self, number: int, elements: slice | None = None) -> Tensor:
        """v = P g_p of the same."""
        return self.gradient(number, elements).mul_(self.scale(number, elements))


def aim(scene: Scene, window: int, rate: float | None = None) -> Aim | None:
    """One gradient of the probe, every knob at its base; `None` before the optimizer has a state to read P from.

    Args:
        rate: in place of each group's learning rate in P.
    """
    model, optimizer = scene.replicas.hosts[0]
    # Whether an optimizer keeps anything is known once it has stepped.
    stateless = all(isinstance(each, SGD) or (window > 0 and keeps_nothing(each)) for each in chained(optimizer))
    if not optimizer.state and not stateless:
        return None
    losses: list[Tensor] = []

    def each() -> Iterator[Tensor]:
        for batch in scene.probe.draw(window):
            loss = differentiable(flat(scene.probe.loss(model, batch)))
            losses.append(loss.detach())
            yield loss.sum()

    with scene.at_base(), scene.probe.evaluated(model, window, optimizer), torch.enable_grad():
        sums = gradients.summed(model, each())
    known = torch.cat(checked(losses))
    own = tensors.trained(model)
    group_of = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}

    def scale(number: int, elements: slice | None) -> Tensor | float:
        parameter = own[number]
        if id(parameter) not in group_of:
            return 0.0
        found = preconditioner(optimizer, group_of[id(parameter)], parameter, rate, elements)
        # Without a state it has never had a gradient, as the rest of the optimizer has: nothing moves it.
        return 0.0 if found is None else found

    return Aim(sums, known.numel(), scale, known.double().mean())
