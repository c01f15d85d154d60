"""The gradient of a loss that belongs to no training step, whatever shares or shards the model's gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hdet.errors import StepError
from hdet.replicas import tensors
from hdet.replicas.distributed import fully_sharded

REENTRANT = (
    "the probe's loss goes through torch.utils.checkpoint(..., use_reentrant=True), which hides parameters from "
    "torch.autograd.grad, so that nothing can be learnt of them; give it use_reentrant=False, or no checkpointing "
    "in eval mode"
)
MIXED_HOOK = (
    "a hook of torch.autograd.graph.register_multi_grad_hook waits for gradients of parameters and of other tensors at "
    "once, and torch runs none such under torch.autograd.grad, by which the probe asks; give it mode='any', or take it "
    "off in eval mode"
)

Take = Callable[[int, Tensor], None]
"""Told a parameter's number among `tensors.trained`, and a gradient of it."""


def summed(model: nn.Module, losses: Iterable[Tensor]) -> list[Tensor]:
    """The gradient of the sum of 0-dim losses, in its own dtype, for each of `tensors.trained(model)`.

    A sparse one as a dense tensor, and zeros for a parameter that no loss depends on; of sharded parameters this rank's
    part. Each loss is asked for when the one before has been differentiated, so that one graph is alive at a time. What
    `p.grad` holds is left alone, and neither DistributedDataParallel nor an optimizer that steps in backward notices
    anything.

    Under `fully_shard` it is a collective: every rank has the same losses and takes part in each.
    """
    own = tensors.trained(model)
    total: list[Tensor | None] = [None] * len(own)
    if fully_sharded.used(model):
        # Its hooks put gradients into `p.grad`; the sharded parameters are not what the graph was made of.
        with _without_gradients(own), fully_sharded.reducing(model):
            for loss in losses:
                loss.backward()
            total = [parameter.grad for parameter in own]
    else:

        def add(number: int, gradient: Tensor) -> None:
            # Two of them may share memory: not in place.
            before = total[number]
            total[number] = gradient if before is None else before + gradient

        for loss in losses:
            _handed_over(loss, own, add)
    return [_part(parameter, gradient) for parameter, gradient in zip(own, total, strict=True)]


def _handed_over(loss: Tensor, own: Sequence[nn.Parameter], take: Take) -> None:
    """Differentiate a loss; each gradient is given away when backward has found it, and not kept by backward."""

    reached: set[int] = set()

    def found(number: int, gradient: Tensor) -> Tensor | None:
        reached.add(number)
        take(number, gradient.detach())
        if type(gradient) is not Tensor or gradient.layout != torch.strided:
            return None
        # What backward would keep to the end instead, in no memory.
        return torch.zeros((), dtype=gradient.dtype, device=gradient.device).expand_as(gradient)

    handles = [parameter.register_hook(partial(found, number)) for number, parameter in enumerate(own)]
    root = loss.grad_fn
    try:
        with _without_multi_grad_hooks(own):
            torch.autograd.grad(loss, own, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" in str(error):
            raise StepError(REENTRANT) from error
        if "_will_engine_execute_node" in str(error):
            raise StepError(MIXED_HOOK) from error
        raise
    finally:
        for handle in handles:
            handle.remove()
    missed = any(p.grad is not None for number, p in enumerate(own) if number not in reached)  # training reaches it
    if missed and _is_reentrant(root):
        raise StepError(REENTRANT)


@contextmanager
def _without_multi_grad_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """No `torch.autograd.graph.register_multi_grad_hook` of mode "all" runs: torch raises where it meets one of a leaf.

    They see gradients and change none. Other hooks may be masks, without which evidence would count frozen entries.
    """
    silenced = [
        (hooks, key, hook)
        for hooks in (parameter._backward_hooks or {} for parameter in parameters)
        for key, hook in hooks.items()
        if getattr(hook, "__module__", None) == "torch.autograd.graph"
    ]
    for hooks, key, _ in silenced:
        hooks[key] = _no_hook  # in place: autograd reads this dict
    try:
        yield
    finally:
        for hooks, key, hook in silenced:
            if key in hooks:  # removed meanwhile it stays away
                hooks[key] = hook


def _no_hook(*_: object) -> None: ...


def _is_reentrant(root: Any) -> bool:
    """Whether a graph has a part that reentrant activation checkpointing hides."""
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        if type(node).__name__ == "CheckpointFunctionBackward":
            return True
        following = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= following
        waiting.extend(following)
    return False


def _part(parameter: nn.Parameter, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return torch.zeros_like(tensors.local(parameter.detach()))
    placements = getattr(parameter, "placements", None)
    if placements is not None and getattr(gradient, "placements", placements) != placements:
        gradient = gradient.redistribute(placements=placements)  # type: ignore[attr-defined]
    own = tensors.local(gradient.detach())
    return own if own.layout == torch.strided else own.to_dense()


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
