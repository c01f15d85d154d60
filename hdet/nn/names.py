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
    for name, module in model.named_modules():
        parts = name.split(".") if name else []
        if parts[:1] == ["module"] and isinstance(model, DistributedDataParallel | DataParallel):
            parts = parts[1:]
        yield ".".join(part for part in parts if part not in _WRAPPERS), module
