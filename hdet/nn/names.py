"""The names of a model's modules, free of the segments that wrappers put in between."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""What torch.compile, FullyShardedDataParallel and activation checkpointing call the module they wrap."""


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Like `model.named_modules()`, but a module is called what it is called in the unwrapped model.

    A wrapper and the module it wraps have the same name here; both are yielded, the wrapper first.

    >>> [name for name, _ in named_modules(nn.DataParallel(nn.Sequential(nn.ReLU())))]
    ['', '', '0']
    """
    inner: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | DataParallel):
            inner.add(f"{name}.module" if name else "module")
        parts = name.split(".") if name else []
        kept = (
            part
            for place, part in enumerate(parts, 1)
            if part not in _WRAPPERS and ".".join(parts[:place]) not in inner
        )
        yield ".".join(kept), module


def named_parameters(model: nn.Module, recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a model by every name that they have, or by one where its own method cannot be asked for all.

    >>> tied = nn.Linear(2, 2)
    >>> [name for name, _ in named_parameters(nn.Sequential(tied, tied))]
    ['0.weight', '0.bias', '1.weight', '1.bias']
    """
    try:
        return model.named_parameters(recurse=recurse, remove_duplicate=False)
    except TypeError:
        return model.named_parameters(recurse=recurse)
