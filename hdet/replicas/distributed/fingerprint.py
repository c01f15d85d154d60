"""Fingerprints of tensors, to tell whether ranks hold the same bits without sending them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """[2] int64: plain and position-weighted sums of the tensors' bits as integers, modulo 2^64.

    One pass over the memory. Any single change shows; changes that cancel in both sums are what it cannot see,
    which rounding and training do not produce.

    >>> a, b = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    >>> bool((fingerprint([a, b], a.device) == fingerprint([b, a], a.device)).all())
    False
    """
    sums = [t.contiguous().view(WORDS[t.element_size()]).sum(dtype=torch.int64).to(device) for t in tensors if t.numel()]
    if not sums:
        return torch.zeros(2, dtype=torch.int64, device=device)
    each = torch.stack(sums)
    places = torch.arange(1, len(sums) + 1, dtype=torch.int64, device=device)
    return torch.stack([each.sum(), (each * places).sum()])
