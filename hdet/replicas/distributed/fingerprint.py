"""Fingerprints of tensors, to tell whether ranks hold the same bits without sending them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdet.replicas.dense import can_be_written

WIDTH = 4096
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def fingerprint(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """[2] int64: plain and position-weighted sums of the tensors' bits as integers, modulo 2^64.

    Two passes over the memory. Any single change shows; changes that cancel in both sums are what it cannot see,
    which rounding and training do not produce. What cannot be written over, as sparse tensors, is not looked at.

    >>> a, b = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    >>> bool((fingerprint([a, b], a.device) == fingerprint([b, a], a.device)).all())
    False
    >>> fingerprint([torch.ones(2, dtype=torch.complex128)], a.device).shape
    torch.Size([2])
    """
    each = fingerprints([tensor for tensor in tensors if can_be_written(tensor) and tensor.numel()], device)
    places = torch.arange(1, len(each) + 1, dtype=torch.int64, device=device)
    return torch.stack([each[:, 0].sum(), (each.sum(dim=1) * places).sum()])


def fingerprints(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """[len(tensors), 2] int64: of each tensor by itself."""
    bits = [tensor.int_repr() if tensor.is_quantized else tensor for tensor in tensors]  # torch ends the process else
    sums = [_sums(t.contiguous().flatten().view(WORDS[t.element_size()])).to(device) for t in bits]
    return torch.stack(sums) if sums else torch.zeros(0, 2, dtype=torch.int64, device=device)


def _sums(words: Tensor) -> Tensor:
    """[2] int64: the sum of the words, and the sum weighted by position, without a temporary of their size."""
    rows = words.numel() // WIDTH
    square, rest = words[: rows * WIDTH].view(rows, WIDTH), words[rows * WIDTH :]
    by_column, by_row = square.sum(dim=0, dtype=torch.int64), square.sum(dim=1, dtype=torch.int64)
    weighted = _placed(by_column) + WIDTH * _placed(by_row) + _placed(rest.long())
    return torch.stack([by_column.sum() + rest.sum(dtype=torch.int64), weighted])


def _placed(values: Tensor) -> Tensor:
    return (values * torch.arange(1, values.numel() + 1, dtype=torch.int64, device=values.device)).sum()
