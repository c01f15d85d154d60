"""The tensors of one replica: which there are, and arithmetic on lists of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def parameters(model: nn.Module) -> list[Tensor]:
    """Every parameter once (tied ones too), frozen ones included, detached and sharing memory."""
    return [parameter.detach() for parameter in model.parameters() if parameter.numel()]


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that receive gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.numel()]


def floating_buffers(model: nn.Module) -> list[Tensor]:
    """Buffers that can be averaged."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point() and buffer.numel()]


def other_buffers(model: nn.Module) -> list[Tensor]:
    """Integer and boolean buffers, such as BatchNorm's batch counter: one replica's are taken over."""
    return [buffer for buffer in model.buffers() if not buffer.is_floating_point() and buffer.numel()]


def moments(optimizer: Optimizer) -> tuple[list[Tensor], list[Tensor]]:
    """Optimizer state in the order of its parameters: (tensors to average, counters and others to take over)."""
    averaged: list[Tensor] = []
    taken: list[Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for value in optimizer.state.get(parameter, {}).values():
                if not isinstance(value, Tensor) or not value.numel():
                    continue
                like = value.is_floating_point() and value.dim() > 0
                (averaged if like else taken).append(value)
    return averaged, taken


def clones(tensors: Sequence[Tensor], device: torch.device | str | None = None) -> list[Tensor]:
    """Copies, on `device` where given."""
    return [t.detach().to(device=device, copy=True) for t in tensors]


@torch.no_grad()
def copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Write `sources` over `targets`, across devices and dtypes."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


@torch.no_grad()
def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """A 0-dim boolean tensor, on the tensors' device: no element is infinite or NaN. No synchronisation."""
    floating = [t for t in tensors if t.is_floating_point()]
    if not floating:
        return torch.tensor(True)
    # A sum of absolute values is finite unless an element is not, or it overflows, which is no healthier.
    norms = torch._foreach_norm(floating, 1)
    return torch.stack([norm.float() for norm in norms]).isfinite().all()


@torch.no_grad()
def mean_(members: Sequence[Sequence[Tensor]], targets: Sequence[Sequence[Tensor]]) -> None:
    """Write the element-wise mean of the members' tensors to every target, reduced in float32.

    Computed as first + mean(member - first), which leaves members that are identical as they are, bit for bit,
    whatever their number.
    """
    if not members or not members[0]:
        return
    first = [_wide(t) for t in members[0]]
    total = [torch.zeros_like(t) for t in first]
    for member in members[1:]:
        torch._foreach_add_(total, torch._foreach_sub([_wide(t) for t in member], first))
    torch._foreach_mul_(total, 1.0 / len(members))
    merged = torch._foreach_add(first, total)
    for target in targets:
        copy_(target, merged)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


@contextmanager
def substituted(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Put `values` in place of `tensors` inside the block, in their own memory, and put them back after."""
    saved = clones(tensors)
    copy_(tensors, values)
    try:
        yield
    finally:
        copy_(tensors, saved)


@contextmanager
def evaluating(model: nn.Module, optimizer: Optimizer | None = None) -> Iterator[None]:
    """Eval mode inside the block; afterwards each submodule is as it was, however mixed they were.

    An optimizer with modes of its own (Schedule-Free: `optimizer.eval()`) is switched as well.
    """
    training = [module for module in model.modules() if module.training]
    switch = getattr(optimizer, "eval", None)
    in_train_mode = all(group.get("train_mode", True) for group in optimizer.param_groups) if optimizer else False
    model.eval()
    if switch is not None and in_train_mode:
        switch()
    try:
        yield
    finally:
        if switch is not None and in_train_mode:
            optimizer.train()  # type: ignore[union-attr]
        for module in training:
            module.training = True
