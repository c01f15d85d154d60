"""What takes a number from a tensor to the host, for which a device is waited."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
)


class Reads(TorchDispatchMode):
    """Notes every operator that takes a number from a tensor to the host; `besides` those of some tensors."""

    def __init__(self, besides: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._besides = {tensor.data_ptr() for tensor in besides}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS and args[0].data_ptr() not in self._besides:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))
