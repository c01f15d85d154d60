"""A merge that travels while training goes on, and is applied as a correction when it has arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hdet.replicas import tensors
from hdet.replicas.distributed.layout import Layout


class Flight:
    """The mean of the replicas at a window's end, under way.

    theta_r(t + k) <- theta_r(t + k) + change(mean_s theta_s(t)) - theta_r(t): what a replica did in the k steps
    meanwhile stays, and what set it apart before is taken back.

    Args:
        parameters: those that are merged, as they are at the window's end.
        group: one of its own, so that its collective does not queue before those of training.

    Attributes:
        change: what becomes of the mean, called once; None where it is the merge itself.
    """

    @torch.no_grad()
    def __init__(self, parameters: Sequence[nn.Parameter], layout: Layout, group: dist.ProcessGroup) -> None:
        self.parameters = parameters
        self.steps = 0
        self.change: Callable[[list[Tensor]], list[Tensor]] | None = None
        self._own = own = [tensors.local(parameter.detach()) for parameter in parameters]
        self._before = tensors.clones(own)
        self._parts: list[tuple[list[int], Tensor, dist.Work]] = []  # by dtype: which parameters, joined
        self._mean: list[Tensor] | None = None
        self._merged: list[Tensor] | None = None
        dtypes = [tensors.wide_type(t.dtype) for t in own]
        for dtype in dict.fromkeys(dtypes):
            numbers = [number for number, wide in enumerate(dtypes) if wide == dtype]
            flat = torch.cat([own[number].reshape(-1).to(dtype) for number in numbers])
            flat.mul_(1.0 / layout.places)
            work = dist.all_reduce(flat, group=group, async_op=True)
            assert work is not None
            self._parts.append((numbers, flat, work))

    def mean(self) -> list[Tensor]:
        """The mean, in the order of the parameters; waits for it if need be."""
        if self._mean is None:
            found: dict[int, Tensor] = {}
            for numbers, flat, work in self._parts:
                work.wait()
                pieces = tensors.parted(flat, [self._own[number] for number in numbers])
                found.update(zip(numbers, pieces, strict=True))
            self._mean = [found[number] for number in range(len(self._own))]
        return self._mean

    @torch.no_grad()
    def merged(self) -> list[Tensor]:
        """What the parameters at the window's end become; worked out once."""
        if self._merged is None:
            self._merged = self.mean() if self.change is None else self.change(self.mean())
        return self._merged

    @torch.no_grad()
    def land(self) -> None:
        """Correct the parameters; where no step was made since, they become the mean itself."""
        merged = self.merged()
        if self.steps == 0:
            tensors.copy_(self._own, merged)
            return
        for own, mean, before in zip(self._own, merged, self._before, strict=True):
            own.add_((mean - before).to(own.dtype))
