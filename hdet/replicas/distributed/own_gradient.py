"""A replica's own gradient, seen while data parallelism averages gradients in its backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from hdet.replicas import tensors


class OwnGradient:
    """Adds up what backward gives each parameter, before DistributedDataParallel takes it away to be averaged.

    A hook on each parameter is called as its gradient is there, and before `.grad` is written; DDP's own hook, which
    fills buckets and sends them, comes after that (torch's notes on autograd, "Backward Hooks execution"). So it makes
    no difference how DDP sends them: by its all-reduce or by any communication hook, in buckets that are views or
    not, now or, under `no_sync`, later; and it goes on doing so while backward goes on. Hooks are there in passes that
    are observed and in no others. What `torch.autograd.grad` asks for the parameters inside such a pass would count
    as well.

    Memory: one buffer of the size of the trained parameters and of their type, from the first observed pass on.

    Source: fairscale's AdaScale sees local gradients beside DDP in this way.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters: list[nn.Parameter] = []
        self._pieces: list[Tensor] = []
        self._heard: set[int] = set()
        self.flat: Tensor | None = None
        """[P] what the last observed pass gave, in the order of `tensors.trained`; zeros for parameters not used."""

    @property
    def heard(self) -> bool:
        """Whether the last observed pass gave anything."""
        return bool(self._heard) or not self._parameters

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Observe the backward passes inside the block, one or several."""
        self._prepare()
        handles = [
            p.register_hook(partial(self._hear, number))  # type: ignore[no-untyped-call]
            for number, p in enumerate(self._parameters)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for number, piece in enumerate(self._pieces):
            if number not in self._heard:
                piece.zero_()

    def _prepare(self) -> None:
        own = tensors.trained(self._model)
        self._heard = set()
        if self.flat is not None and [id(p) for p in own] == [id(p) for p in self._parameters]:
            return
        dtype = own[0].dtype
        for parameter in own:
            dtype = torch.promote_types(dtype, parameter.dtype)
        self.flat = torch.empty(sum(p.numel() for p in own), dtype=dtype, device=own[0].device)
        pieces = torch.split(self.flat, [p.numel() for p in own])
        self._pieces = [piece.view(p.shape) for piece, p in zip(pieces, own, strict=True)]
        self._parameters = own

    def _hear(self, number: int, gradient: Tensor) -> None:
        given = gradient.detach()
        given = given.to_dense() if given.layout != torch.strided else given
        if number in self._heard:
            self._pieces[number].add_(given)
        else:
            self._pieces[number].copy_(given)
            self._heard.add(number)
