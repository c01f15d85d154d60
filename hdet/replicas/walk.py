"""The parameters of a model, walked anew only where a module or a parameter has come, gone or been replaced."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from hdet.errors import ConfigError


class Walk:
    """The parameters of one model that have elements, as they are at every call.

    `model.parameters()` of hundreds of modules takes longer than the rest of a step. What it found holds for as long as
    all modules have the same submodules and parameters, the objects themselves.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[nn.Module] = []
        self._sharded: list[Any] = []
        self._members: list[nn.Module | nn.Parameter | None] = []
        self._identities: list[int] = []
        self._every: list[nn.Parameter] = []
        self._found: list[nn.Parameter] = []

    def parameters(self) -> list[nn.Parameter]:
        """Every one once, tied and frozen ones included; of a fully sharded model the shards."""
        self.every()
        return self._found

    def every(self) -> list[nn.Parameter]:
        """The same, those without elements included: `list(model.parameters())`."""
        for module in self._sharded:
            module.reshard()
        if not self._modules or [id(member) for member in self._all()] != self._identities:
            self._look()
        return self._every

    def _all(self) -> list[nn.Module | nn.Parameter | None]:
        """What the modules hold now."""
        return [member for own in self._modules for held in (own._modules, own._parameters) for member in held.values()]

    def _look(self) -> None:
        self._modules = list(self._model.modules())
        self._sharded = fully_sharded(self._modules)
        for module in self._sharded:
            module.reshard()
        self._members = self._all()  # held, so that no identity is given to another object
        self._identities = [id(member) for member in self._members]
        self._every = list(self._model.parameters())
        if any(map(is_lazy, self._every)):
            raise ConfigError(
                "the model has parameters without a shape yet, as of nn.LazyLinear; run a batch through it first"
            )
        self._found = [parameter for parameter in self._every if parameter.numel()]


def fully_sharded(modules: Iterable[nn.Module]) -> list[Any]:
    """Those on which `fully_shard` was called; torch's sharding is not imported where nobody did."""
    sharding = sys.modules.get("torch.distributed.fsdp")
    return [] if sharding is None else [module for module in modules if isinstance(module, sharding.FSDPModule)]
