"""Where the held-out loss would have the weights go, in the units in which the optimizer moves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from hdet.evidence.parts.preconditioner import keeps_nothing, preconditioner
from hdet.evidence.scene import Scene
from hdet.replicas import gradients, tensors
from hdet.replicas.chained_optimizer import chained
from hdet.replicas.replicas import present
from hdet.signals.probe import checked, differentiable, flat


@dataclass(frozen=True)
class Aim:
    """The gradient g_p of the mean probe loss at the weights as they are, and how the optimizer scales it, P.

    Attributes:
        sums: of the gradients over the probe's losses, for each of `tensors.trained`, in its own dtype; of sharded
            ones this rank's part.
        losses: [J] these, of the sub-batches.
        scale: of one of them, by its place, P.
        loss: the mean probe loss, 0-dim.
    """

    sums: list[Tensor]
    losses: Tensor
    scale: Callable[[int, slice | None], Tensor | float]
    loss: Tensor

    def gradient(self, number: int, elements: slice | None = None) -> Tensor:
        """g_p of one of `tensors.trained`, or of some of its elements as of a vector, in float32 at least."""
        own = self.sums[number] if elements is None else self.sums[number].reshape(-1)[elements]
        return tensors.wide(own) / float(self.losses.numel())

    def step(self, number: int, elements: slice | None = None) -> Tensor:
        """v = P g_p of the same."""
        return self.gradient(number, elements).mul_(self.scale(number, elements))


def leaves_no_state(scene: Scene) -> bool:
    """At a window's end, whether its steps moved weights and the optimizer has no state of them: it keeps none.

    A collective, and waits for the device, where an optimizer that is not torch's has no state. Of SGD, whose P needs
    none, it is not asked.
    """
    optimizer = scene.replicas.hosts[0][1]
    parts = chained(optimizer)
    if optimizer.state or all(isinstance(each, SGD) for each in parts) or not all(map(keeps_nothing, parts)):
        return False
    pairs = zip(scene.opening(), scene.moving.values(), strict=True)
    moved = any(not torch.equal(opened.to(own.device), own) for opened, own in pairs)
    row = torch.tensor([float(moved)], dtype=torch.float64, device="cpu")
    told = scene.replicas.gather(row.expand(len(scene.replicas.local), -1))
    return bool((told[present(told)] > 0.0).any())


def aim(scene: Scene, window: int, rate: float | None = None, *, stateless: bool = False) -> Aim | None:
    """One gradient of the probe, every knob at its base; `None` before the optimizer has a state to read P from.

    Args:
        rate: in place of each group's learning rate in P.
        stateless: whether the optimizer is known to keep none (`leaves_no_state`).
    """
    model, optimizer = scene.replicas.hosts[0]
    if not (optimizer.state or stateless or all(isinstance(each, SGD) for each in chained(optimizer))):
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
    # Where replicas come apart by them, the first one's rate and momentum lie off their bases.
    with scene.at_base() if scene.apart else nullcontext():
        groups = [_as_now(group) if scene.apart else group for group in optimizer.param_groups]
    group_of = {id(parameter): group for group in groups for parameter in group["params"]}

    def scale(number: int, elements: slice | None) -> Tensor | float:
        parameter = own[number]
        if id(parameter) not in group_of:
            return 0.0
        found = preconditioner(optimizer, group_of[id(parameter)], parameter, rate, elements)
        # Without a state it has never had a gradient, as the rest of the optimizer has: nothing moves it.
        return 0.0 if found is None else found

    return Aim(sums, known, scale, known.double().mean())


def _as_now(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}
