"""The line between two lists of weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import compress

import torch
from torch import Tensor

from hdet.evidence.parts.losses_at import Write
from hdet.replicas import tensors


class Segment:
    """start + x (end - start), written over a model's weights for any x.

    Nothing of the size of the weights is allocated: where they have to be converted, a part at a time is.

    Args:
        start, end: weights in the model's order, on any device and of any dtype; the line is worked out in those
            of `start`. `end` may be the model's own weights, of which a copy is then made.
        moves: which of them lie on the line. The others are at `end` for every x.
    """

    def __init__(self, start: Sequence[Tensor], end: Sequence[Tensor], moves: Sequence[bool]) -> None:
        self._moves = moves
        self._stays = [not moving for moving in moves]
        self._start = list(compress(start, moves))
        self._end = list(compress(end, moves))
        self._rest = list(compress(end, self._stays))
        self._live: Sequence[Tensor] | None = None
        self._in_place = False

    def at(self, x: float) -> Write:
        """The point at x: 0 is the start and 1 the end."""
        return partial(self._write, x)

    @torch.no_grad()
    def _write(self, x: float, live: Sequence[Tensor]) -> None:
        moving = list(compress(live, self._moves))
        if live is not self._live:  # the same list as long as the weights stay in their memory
            self._live = live
            ends = list(zip(moving, self._start, self._end, strict=True))
            self._in_place = all(own.dtype == a.dtype == b.dtype and own.device == b.device for own, a, b in ends)
            if any(own.data_ptr() == b.data_ptr() for own, _, b in ends):
                self._end = tensors.clones(self._end)  # before it is written over
        if self._in_place:
            tensors.copy_(moving, self._start)
            if moving:
                torch._foreach_lerp_(moving, self._end, x)
        else:
            for part in tensors.slices(moving):
                pairs = list(zip(moving[part], self._start[part], self._end[part], strict=True))
                first = [a.to(own.device) for own, a, _ in pairs]
                last = [b.to(own.device, a.dtype) for own, a, b in pairs]
                tensors.copy_(moving[part], torch._foreach_lerp(first, last, x))
        tensors.copy_(list(compress(live, self._stays)), self._rest)
