"""A replica's own gradient, seen while data parallelism averages gradients in its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

Take = Callable[[Sequence[int], Sequence[Tensor]], None]
"""Is given gradients as they come, and which parameters they are of."""

TOGETHER = 2**20
"""Elements that are held until they are handed over."""


class OwnGradient:
    """Hands on what backward gives each parameter, before DistributedDataParallel takes it away to be averaged.

    A hook on each parameter is called as its gradient is there, and before `.grad` is written; DDP's own hook, which
    fills buckets and sends them, comes after that (torch's notes on autograd, "Backward Hooks execution"). So it makes
    no difference how DDP sends them: by its all-reduce or by any communication hook, in buckets that are views or
    not, now or, under `no_sync`, later; and it goes on doing so while backward goes on. What `torch.autograd.grad` asks
    for the parameters inside such a pass would count as well. Hooks stay until `release`, so that a pass does not pay
    for putting them on; outside observed passes they do nothing.

    Memory: copies of gradients of `TOGETHER` elements while backward goes on.

    Source: fairscale's AdaScale sees local gradients beside DDP in this way.
    """

    def __init__(self) -> None:
        self._parameters: Sequence[nn.Parameter] = []
        self._handles: list[Any] = []
        self._take: Take | None = None
        self._numbers: list[int] = []
        self._gradients: list[Tensor] = []
        self._elements = 0

    @contextmanager
    def listening(self, parameters: Sequence[nn.Parameter], take: Take) -> Iterator[None]:
        """Observe the backward passes inside the block, one or several: `take` is given their gradients, in parts.

        Those of a parameter that several passes reach come several times.
        """
        self._put_on(parameters)
        self._take = take
        try:
            yield
            self._hand_over()
        finally:
            self._take = None
            self._clear()

    def release(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._parameters, self._handles = [], []

    def _put_on(self, parameters: Sequence[nn.Parameter]) -> None:
        if parameters is self._parameters:
            return
        self.release()
        self._parameters = parameters
        # Not pickled with a model, and no warning that they are not.
        for number, parameter in enumerate(parameters):
            hook = unserializable_hook(partial(self._hear, number))
            self._handles.append(parameter.register_hook(hook))

    def _hear(self, number: int, gradient: Tensor) -> None:
        if self._take is None:
            return
        if gradient.numel() >= TOGETHER:
            self._take([number], [gradient.detach()])
            return
        self._numbers.append(number)
        # A copy: where nobody else holds it, this memory becomes `.grad`, which is averaged in place.
        self._gradients.append(gradient.detach().clone())
        self._elements += gradient.numel()
        if self._elements >= TOGETHER:
            self._hand_over()

    def _hand_over(self) -> None:
        if self._numbers and self._take is not None:
            self._take(self._numbers, self._gradients)
        self._clear()

    def _clear(self) -> None:
        self._numbers, self._gradients, self._elements = [], [], 0
