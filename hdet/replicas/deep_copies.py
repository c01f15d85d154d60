"""Copies of tensors that `copy.deepcopy` has none of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hdet.errors import ConfigError


def memo_of_sparse(tensors: Iterable[Any]) -> dict[int, Any]:
    """The memo for `copy.deepcopy`, which by itself copies no compressed tensors, nor sparse parameters.

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
