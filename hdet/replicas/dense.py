"""What can be asked of a tensor: is it dense, has it arithmetic, can it be written over; another shape for one; and
writes that are undone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
"""Dtypes with arithmetic of their own. Quantized states have scales that tell nothing by themselves."""


def is_dense(tensor: Tensor) -> bool:
    """Whether it has a value for each element: it is neither sparse nor nested, nor on the device meta."""
    return tensor.layout is torch.strided and not tensor.is_nested and tensor.device.type != "meta"


def has_arithmetic(tensor: Tensor) -> bool:
    """Whether it is dense, and of a dtype with arithmetic of its own."""
    return tensor.dtype in PLAIN and is_dense(tensor)


def can_be_written(tensor: Tensor) -> bool:
    """Whether all of its values can be written over: it is dense, and each element has a place of its own.

    One that was made under `torch.inference_mode()` is written there only.
    """
    closed = tensor.is_conj() or tensor.is_neg() or tensor.is_inference()
    return is_dense(tensor) and not closed and all(map(_apart, tensor.shape, tensor.stride()))


def _apart(size: int, step: int) -> bool:
    return size <= 1 or step != 0


def resized(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor itself, which from now on has this shape, and any values if it had another."""
    return tensor if tensor.shape == torch.Size(shape) else tensor.resize_(shape)


def unwritten(tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """As its block ends, to autograd nobody has written these since it was made.

    For tensors that hold again, bit for bit, what they held then. A graph that is still to go backward may hold them,
    as that of a loss whose optimizer steps later does. Views of one tensor have one counter: none may be left written.
    """
    return _unsafe_preserve_version_counter(tuple(tensor for tensor in tensors if not tensor.is_inference()))
