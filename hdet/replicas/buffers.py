"""A model's buffers as they were, to be put back after forward passes in training mode have changed them."""

from __future__ import annotations

import torch
from torch import nn


class HeldBuffers:
    """Copies of all buffers of a model, its own or not in its `state_dict`.

    A forward pass may write into a buffer (batch statistics) or replace it by another tensor; both are undone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Every buffer is the tensor that it was, with the values that it had."""
        for module, name, buffer, value in self._held:
            module._buffers[name] = buffer
            buffer.copy_(value)
