"""Which examples form a batch: a counter-based generator, so that no draw depends on those before it."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray


def draws(count: int, *, below: int, seed: int, stream: str, step: int = 0, replica: int = 0) -> NDArray[np.int64]:
    """`count` integers in [0, below), a pure function of the other arguments.

    The raw 64-bit words of Philox keyed by (seed, stream) with (replica, step) as the counter's upper words,
    modulo `below`: the bias of the modulo is under below / 2**64, and the raw stream, unlike
    `Generator.integers`, is promised not to change between versions of NumPy.

    >>> draws(4, below=10, seed=0, stream="train", step=3).tolist()
    [9, 1, 0, 4]
    """
    name = int.from_bytes(blake2b(stream.encode(), digest_size=8).digest(), "little")
    words = np.random.Philox(key=[seed, name], counter=[0, replica, step, 0]).random_raw(count)
    return (words % np.uint64(below)).astype(np.int64)
