"""BatchNorm layers of a model: which keep statistics, and evaluation by those of each batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

FEWEST = 8
"""Values of a channel below which a batch does not tell its own mean and variance: of two all outputs are -1 and 1."""


def keeping(model: nn.Module) -> dict[str, _BatchNorm]:
    """By name the BatchNorm layers that keep running statistics."""
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm))
    return {name: layer for name, layer in layers if layer.running_mean is not None and not is_lazy(layer.running_mean)}


def following(model: nn.Module) -> dict[str, _BatchNorm]:
    """Of these, by name those whose statistics follow the batches now: they are in training mode."""
    return {name: layer for name, layer in keeping(model).items() if layer.training}


@contextmanager
def by_each_batch(model: nn.Module) -> Iterator[None]:
    """In evaluations inside the block, layers whose statistics follow the batches have those of each batch.

    The kept ones lag some steps behind the weights (ten, by torch's momentum), so that of two points of a path they
    fit the one nearer to its beginning. Nothing is kept of the batches, and no rank waits for another (SyncBatchNorm).
    A layer that sees fewer than `FEWEST` values a channel has its kept ones.
    """
    hooks = [
        hook
        for layer in following(model).values()
        for hook in (
            layer.register_forward_pre_hook(_lend, with_kwargs=True),
            layer.register_forward_hook(partial(_take_back, (layer.running_mean, layer.running_var)), always_call=True),
        )
    ]
    try:
        # Compiled, the hooks would make a graph of their own.
        with torch.compiler.set_stance("force_eager") if hooks else nullcontext():
            yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def _lend(layer: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any]) -> None:
    """By lending statistics, not by training mode: subclasses then evaluate as they do, and SyncBatchNorm waits not."""
    assert isinstance(layer, _BatchNorm)
    assert layer.running_var is not None
    values = first_of(inputs, named)
    if values is not None and values.numel() >= FEWEST * values.shape[1]:
        over = [dim for dim in range(values.dim()) if dim != 1]
        layer.running_var, layer.running_mean = torch.var_mean(values.to(layer.running_var.dtype), over, correction=0)


def _take_back(kept: Sequence[Tensor | None], layer: nn.Module, inputs: object, output: object) -> None:
    assert isinstance(layer, _BatchNorm)
    layer.running_mean, layer.running_var = kept


def first_of(inputs: Sequence[Any], named: Mapping[str, Any]) -> Tensor | None:
    """What a layer was called with."""
    return next((value for value in (*inputs, *named.values()) if isinstance(value, Tensor)), None)
