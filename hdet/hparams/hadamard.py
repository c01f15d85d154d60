"""Hadamard matrices: square, entries +-1, columns orthogonal. The stuff that two-level designs are cut from.

Orders come from Sylvester's doubling (powers of two) and Paley's two constructions over the integers modulo a
prime. Together they give every multiple of 4 up to 128 but 52, 92, 100 and 116.

Source: Paley 1933, "On Orthogonal Matrices", J. Math. Phys. 12; Hedayat & Wallis 1978, Ann. Statist. 6(6).
"""

from __future__ import annotations

import itertools
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


@lru_cache(maxsize=64)
def hadamard(order: int) -> NDArray[np.int64] | None:
    """A Hadamard matrix [order, order], first column all ones, read-only; None where none is known here.

    Its other columns therefore hold as many -1 as +1.

    >>> hadamard(4).tolist()
    [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    >>> hadamard(6) is None
    True
    """
    base = _undoubled(order)
    if base is None:
        return None
    matrix = _construct(order) if order == base else np.kron(np.array([[1, 1], [1, -1]]), hadamard(order // 2))
    matrix = matrix * matrix[:, :1]
    matrix.setflags(write=False)
    return matrix


def exists(order: int) -> bool:
    """Whether `hadamard(order)` is known."""
    return _undoubled(order) is not None


def order_from(least: int) -> int:
    """The smallest order of a Hadamard matrix known here that is not below `least`.

    >>> [order_from(least) for least in (1, 3, 5, 52)]
    [1, 4, 8, 56]
    """
    return next(order for order in itertools.count(least) if exists(order))


def entries(order: int, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.int8]:
    """hadamard(order)[rows][:, columns], in memory for these entries: thousands of replicas have few knobs.

    A matrix doubled a times from one of order m has the entries (-1)^popcount(i // m & j // m) M[i % m, j % m].

    >>> entries(65536, np.array([0, 3, 65535]), np.array([1, 65535])).tolist()
    [[1, 1], [-1, 1], [-1, 1]]
    """
    base = _undoubled(order)
    assert base is not None  # `exists` was asked
    matrix = hadamard(base)
    assert matrix is not None
    narrow = np.min_scalar_type(order - 1)
    upper, left = (rows, columns) if base == 1 else (rows // base, columns // base)
    # Column by column in memory: there are many rows.
    high = left.astype(narrow)[:, None] & upper.astype(narrow)
    for shift in (32, 16, 8, 4, 2, 1):
        if order >> shift:
            high ^= high >> shift
    signs: NDArray[np.int8] = 1 - 2 * (high & 1).astype(np.int8)
    if base == 1:
        return signs.T
    return matrix[np.ix_(rows % base, columns % base)].astype(np.int8) * signs.T


@lru_cache(maxsize=64)
def _undoubled(order: int) -> int | None:
    """The order of the matrix that doubling starts from; None where there is none."""
    while True:
        if order == 1:
            return 1
        if order != 2 and (order < 4 or order % 4):
            return None
        power_of_two = order & (order - 1) == 0
        first = (order - 1) % 4 == 3 and _is_prime(order - 1)
        second = (order // 2 - 1) % 4 == 1 and _is_prime(order // 2 - 1)
        if not power_of_two and (first or second):
            return order
        order //= 2


def _construct(order: int) -> NDArray[np.int64]:
    """The matrix of an order that no doubling leads to."""
    if order == 1:
        return np.ones((1, 1), dtype=np.int64)
    if (order - 1) % 4 == 3 and _is_prime(order - 1):
        # Paley I: identity plus a skew conference matrix
        skew = _bordered(order - 1)
        skew[1:, 0] = -1
        return skew + np.eye(order, dtype=np.int64)
    # Paley II: a symmetric conference matrix C, each of its entries made a 2 x 2 block
    blocks = np.kron(_bordered(order // 2 - 1), np.array([[1, 1], [1, -1]]))
    return blocks + np.kron(np.eye(order // 2, dtype=np.int64), np.array([[1, -1], [-1, -1]]))


def _bordered(prime: int) -> NDArray[np.int64]:
    """The quadratic residue matrix Q_ij = chi(i - j) modulo a prime, a row and a column of ones in front."""
    chi = np.full(prime, -1, dtype=np.int64)
    chi[np.arange(1, prime) ** 2 % prime] = 1
    chi[0] = 0
    index = np.arange(prime)
    matrix = np.ones((prime + 1, prime + 1), dtype=np.int64)
    matrix[0, 0] = 0
    matrix[1:, 1:] = chi[(index[:, None] - index) % prime]
    return matrix


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, int(number**0.5) + 1))
