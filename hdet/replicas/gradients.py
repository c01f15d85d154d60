"""The gradient of a loss that belongs to no training step, whatever shares or shards the model's gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hdet.errors import ConfigError
from hdet.replicas import tensors
from hdet.replicas.distributed import fully_sharded


def summed(model: nn.Module, losses: Iterable[Tensor]) -> list[Tensor]:
    """The gradient of the sum of 0-dim losses, in float32 at least, for each of `tensors.trained(model)`.

    Zeros for a parameter that no loss depends on; of sharded parameters this rank's part. Each loss is asked for when
    the one before has been differentiated, so that one graph is alive at a time. What `p.grad` holds is left alone,
    and neither DistributedDataParallel nor an optimizer that steps in backward notices anything.

    Under `fully_shard` it is a collective: every rank has the same losses and takes part in each.
    """
    own = tensors.trained(model)
    total: list[Tensor | None] = [None] * len(own)
    if fully_sharded.used(model):
        # Its hooks put gradients into `p.grad`; the sharded parameters are not what the graph was made of.
        with _without_gradients(own), fully_sharded.reducing(model):
            for loss in losses:
                loss.backward()  # type: ignore[no-untyped-call]
            total = [parameter.grad for parameter in own]
    else:
        for loss in losses:
            found = torch.autograd.grad(loss, own, allow_unused=True)
            new: list[Tensor | None] = list(found)
            del found
            for number, part in enumerate(new):
                # One by one, so that no third set of gradients is alive. (Two of them may share memory: not in place.)
                total[number], new[number] = _sum(total[number], part), None
    return [_part(parameter, gradient) for parameter, gradient in zip(own, total, strict=True)]


def of_each(model: nn.Module, losses: Tensor) -> Iterator[list[Tensor]]:
    """The gradients of [J] losses one by one, each as `summed` gives it: J backward passes through their one graph.

    Raises:
        ConfigError: J > 1 under `fully_shard`, which frees what a second backward pass would need.
    """
    if losses.numel() == 1:
        yield summed(model, [losses.sum()])
        return
    if fully_sharded.used(model):
        raise ConfigError(
            f"the probe's loss gave {losses.numel()} losses of one forward pass, and a model under fully_shard runs "
            f"backward through each only once; give hdet.Probe one batch for each sub-batch, and a loss that returns "
            f"one number"
        )
    own = tensors.trained(model)
    for number, loss in enumerate(losses):
        found = torch.autograd.grad(loss, own, allow_unused=True, retain_graph=number + 1 < losses.numel())
        yield [_part(parameter, gradient) for parameter, gradient in zip(own, found, strict=True)]


def _sum(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    return new if old is None else old if new is None else old + new


def _part(parameter: nn.Parameter, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return tensors.wide(torch.zeros_like(tensors.local(parameter.detach())))
    placements = getattr(parameter, "placements", None)
    if placements is not None and getattr(gradient, "placements", placements) != placements:
        gradient = gradient.redistribute(placements=placements)  # type: ignore[attr-defined]
    return tensors.wide(tensors.local(gradient.detach()))


@contextmanager
def _without_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """No parameter has a gradient at first, nor hooks that act on one; afterwards each has what it had."""
    held = [parameter.grad for parameter in parameters]
    hooks = [parameter._post_accumulate_grad_hooks or {} for parameter in parameters]
    silenced = [dict(own) for own in hooks]
    for parameter, own in zip(parameters, hooks, strict=True):
        parameter.grad = None
        own.clear()
    try:
        yield
    finally:
        for parameter, gradient, own, known in zip(parameters, held, hooks, silenced, strict=True):
            parameter.grad = gradient
            own.update(known)
