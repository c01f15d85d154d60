"""BatchNorm layers of a model: which keep statistics, and evaluation by those of each batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

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
    A layer that sees fewer than `FEWEST` values a channel has its kept ones, as has one that normalises by other means
    than `F.batch_norm`.
    """
    hooks = [
        hook
        for layer in following(model).values()
        for hook in (
            layer.register_forward_pre_hook(_enter, prepend=True),
            layer.register_forward_hook(_leave, always_call=True),
        )
    ]
    try:
        # Compiled, the hooks would make a graph of their own.
        with torch.compiler.set_stance("force_eager") if hooks else nullcontext():
            yield
    finally:
        for hook in hooks:
            hook.remove()
        while _PASSES[get_ident()]:  # torch calls no hook after an interrupt, with `always_call` either
            _leave(model, None, None)


@contextmanager
def copies_lent(model: nn.Module) -> Iterator[None]:
    """Inside the block layers whose statistics follow the batches have copies of them.

    A loss that has the model train writes these. Graphs that are still to go backward have the others, unwritten.
    """
    held = [(layer, dict(layer.named_buffers(recurse=False))) for layer in following(model).values()]
    try:
        for layer, buffers in held:
            for name, buffer in buffers.items():
                setattr(layer, name, buffer.clone())
        yield
    finally:
        for layer, buffers in held:
            for name, buffer in buffers.items():
                setattr(layer, name, buffer)


class _ByBatch(TorchFunctionMode):
    """`F.batch_norm` in evaluation has the mean and variance of its input.

    Not by training mode: layers then evaluate as they do, whatever they make of their input first, and SyncBatchNorm
    waits for no rank.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return (_normalised if func is F.batch_norm else func)(*args, **(kwargs or {}))


def _normalised(values: Tensor, mean: Tensor | None, variance: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
    """Torch's own way, in which gradients go through the mean and variance."""
    if values.numel() >= FEWEST * values.shape[1]:
        mean, variance, kwargs["training"] = None, None, True
    return F.batch_norm(values, mean, variance, *args, **kwargs)


_BY_BATCH = _ByBatch()

_PASSES: Counter[int] = Counter()
"""By thread how many layers' passes have the mode in force."""


def _enter(layer: nn.Module, inputs: object) -> None:
    _BY_BATCH.__enter__()  # type: ignore[no-untyped-call]
    _PASSES[get_ident()] += 1


def _leave(layer: nn.Module, inputs: object, output: object) -> None:
    """Not where an error came before `_enter`, as one of a hook of all modules does."""
    if _PASSES[get_ident()]:
        _PASSES[get_ident()] -= 1
        _BY_BATCH.__exit__(None, None, None)  # type: ignore[no-untyped-call]
