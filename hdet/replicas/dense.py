"""What can be asked of a tensor: is it dense, has it arithmetic, can it be written over; and another shape for one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hdet.errors import ConfigError

PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
"""Dtypes with arithmetic of their own. Quantized states have scales that tell nothing by themselves."""


def is_dense(tensor: Tensor) -> bool:
    """Whether it has a value for each element: it is neither sparse nor nested, nor on the device meta."""
    return tensor.layout is torch.strided and not tensor.is_nested and tensor.device.type != "meta"


def has_arithmetic(tensor: Tensor) -> bool:
    """Whether it is dense, and of a dtype with arithmetic of its own."""
    return tensor.dtype in PLAIN and is_dense(tensor)


def can_be_written(tensor: Tensor) -> bool:
    """Whether all of its values can be written over: it is dense, and each element has a place of its own."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return is_dense(tensor) and not lazy and all(map(_apart, tensor.shape, tensor.stride()))


def clones_of_others(tensors: Iterable[Any]) -> dict[int, Any]:
    """A memo for `copy.deepcopy`, which cannot copy tensors that are compressed, nor parameters that are sparse.

    Raises:
        ConfigError: one is nested in the old layout, and has no shape.
    """
    leaves = [own for own in tensors if isinstance(own, Tensor) and own.is_leaf]
    if any(own.is_nested and own.layout is torch.strided for own in leaves):
        raise ConfigError(
            "the model holds a nested tensor of the layout torch.strided, which has no shape and cannot be copied; "
            "make it with layout=torch.jagged, or register it with persistent=False and use no copies"
        )
    return {id(own): _clone(own) for own in leaves if own.layout not in (torch.strided, torch.jagged)}


def _clone(own: Tensor) -> Tensor:
    copied = own.detach().clone().requires_grad_(own.requires_grad)
    return nn.Parameter(copied, own.requires_grad) if isinstance(own, nn.Parameter) else copied


def _apart(size: int, step: int) -> bool:
    return size <= 1 or step != 0


def resized(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor itself, which from now on has this shape, and any values if it had another."""
    return tensor if tensor.shape == torch.Size(shape) else tensor.resize_(shape)
