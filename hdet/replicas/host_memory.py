"""Copies on the host of what lies on an accelerator, in memory from which and to which it copies by itself.

A copy from an accelerator to pinned memory waits for nothing: the host goes on, and may read what has been copied once
the accelerator has come so far. Copies are queued in the stream that computes, and in no other: what is queued after
them, an optimizer's step say, writes over the tensors that they read. A CPU tensor is there at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Then = Callable[[Tensor], object]


def pinned_like(value: Tensor) -> Tensor:
    """Memory on the host for a copy of a tensor, pinned where that is to come from an accelerator."""
    return torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)


def copied(value: Tensor, device: torch.device | str | None) -> Tensor:
    """A copy on a device or beside the tensor; `wait` before the host reads it."""
    to_host = device is not None and torch.device(device).type == "cpu"
    if to_host and value.is_cuda and not hasattr(value, "to_local"):
        return pinned_like(value).copy_(value, non_blocking=True)
    return value.to(device=device, copy=True)


@torch.no_grad()
def copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Write `sources` over `targets`; `wait` before the host reads these."""
    if targets:
        # Other accelerators (mps, xpu) would not be waited for.
        torch._foreach_copy_(list(targets), list(sources), non_blocking=any(own.is_cuda for own in sources))


def wait(sources: Sequence[Tensor]) -> None:
    """Wait once for all that was copied so far from where some tensors lie."""
    for device in {source.device for source in sources if source.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


class OnTheirWay:
    """Tensors that travel to the host, each handed on there in the order in which they were sent.

    Their memory on the host is taken once, and used again: so what is under way is to land before more is sent.
    """

    def __init__(self) -> None:
        self._memory: list[Tensor] = []
        self._under_way: list[tuple[Tensor, Then]] = []
        self._sent: list[Any] = []  # an event of each accelerator

    @property
    def bytes_held(self) -> int:
        """The memory on the host."""
        return sum(own.nbytes for own in self._memory)

    @torch.no_grad()
    def send(self, travellers: Sequence[tuple[Tensor, Then]]) -> None:
        """Begin to copy tensors; each is handed to its function when it has landed."""
        self.land()
        for place, (value, then) in enumerate(travellers):
            held = self._memory[place] if place < len(self._memory) else None
            if held is None or held.shape != value.shape or held.dtype != value.dtype:
                self._memory[place : place + 1] = [held := pinned_like(value)]
            held.copy_(value, non_blocking=value.is_cuda)
            self._under_way.append((held, then))
        for device in {value.device for value, _ in travellers if value.is_cuda}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._sent.append(event)

    @torch.no_grad()
    def land(self) -> None:
        """Wait for what is under way, and hand it on."""
        for event in self._sent:
            event.synchronize()
        landed, self._under_way, self._sent = self._under_way, [], []
        for value, then in landed:
            then(value)
