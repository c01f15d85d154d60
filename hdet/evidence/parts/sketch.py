"""A vector of any length folded into m numbers that keep inner products."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

KEY = 0x6864_6574  # of the signs, which are the same in every process, run and version


class Sketch:
    """The linear map s_i = sum_c sigma_c(i) x_(c m + i): chunks of m elements, added up under random signs.

    Over the signs <s(a), s(b)> has the mean <a, b>, and a standard deviation of at most

        sqrt(|a|^2 |b|^2 + <a, b>^2) / sqrt(m)

    (Charikar, Chen and Farach-Colton 2002, "Finding frequent items in data streams"; Weinberger et al. 2009,
    arXiv:0902.2206). Up to m elements it is the vector itself, and exact.

    A sign depends on nothing but its position, so sketches made in different processes, or before and after a resume,
    may be added and compared. They are read off one table of random signs, at another offset for each chunk:
    offset(c) = c (2 c + 1) modulo a power of two, which is different for all chunks (Rivest et al. 1998, RC6). No
    global random number generator is touched.

    Args:
        length: elements of the vector.
        size: m, the most numbers kept; no less than the square root of `length`.
        device: where sketches lie.

    Attributes:
        size: how many are kept: m, or `length` where that is less.

    >>> sketch = Sketch(10_000, 1024, torch.device("cpu"))
    >>> one = sketch.zeros()
    >>> sketch.add_(one, torch.ones(4_000), position=0)
    >>> sketch.add_(one, torch.ones(6_000), position=4_000)
    >>> whole = sketch.zeros()
    >>> sketch.add_(whole, torch.ones(10_000), position=0)
    >>> torch.equal(one, whole)
    True
    """

    def __init__(self, length: int, size: int, device: torch.device) -> None:
        self.length = length
        self.size, signs = sizes(length, size)
        self.device = device
        self._period = signs - self.size
        self._signs = _signs(self._period, signs).to(device) if signs else None

    def zeros(self) -> Tensor:
        """[size] The sketch of nothing, in float32."""
        return torch.zeros(self.size, dtype=torch.float32, device=self.device)

    def add_(self, target: Tensor, values: Tensor, position: int, scale: float = 1.0) -> None:
        """Add the sketch of `scale` times `values`, one-dimensional, which stand in the vector from `position` on."""
        if self._signs is None:
            target[position : position + values.numel()].add_(values.to(target.device), alpha=scale)
            return
        done = 0
        while done < values.numel():
            chunk, place = divmod(position + done, self.size)
            count = min(values.numel() - done, self.size - place)
            turned = place + chunk * (2 * chunk + 1) % self._period
            piece = values[done : done + count].to(target.device, torch.float32)
            target[place : place + count].addcmul_(piece, self._signs[turned : turned + count], value=scale)
            done += count


def sizes(length: int, size: int) -> tuple[int, int]:
    """How many numbers a sketch of a vector keeps, and how many signs it reads."""
    size = max(size, math.isqrt(length))  # there are as many offsets as elements in a chunk
    return (length, 0) if length <= size else (size, size + (1 << max(6, (size - 1).bit_length())))


def _signs(period: int, length: int) -> Tensor:
    """[length] Random signs in float32 that repeat after `period`."""
    words = np.random.Philox(key=KEY).random_raw(period // 64).astype("<u8")
    bits = np.unpackbits(words.view(np.uint8))
    return torch.from_numpy(np.resize(bits, length).astype(np.float32) * 2.0 - 1.0)
