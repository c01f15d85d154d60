"""Designs: which replica gets which level of which knob in a window, as one [N, K] matrix.

A design is a pure function of its arguments: every process computes it for itself, nothing is communicated
and nothing is saved. Its randomness is the raw output of Philox (a counter-based generator, the same in every
NumPy), keyed by a hash of (seed, window, knob names) and ordered by argsort. No global generator is read or
advanced.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hdet.errors import ConfigError
from hdet.hparams.hadamard import entries, exists, order_from
from hdet.spec import Spec, register

Array = NDArray[np.float64]
Levels = Sequence[Array]

FALLBACK_DRAWS = 16
"""Random designs that `Hadamard` chooses from where no Hadamard matrix fits."""

FEW = 64
"""Words that are put in order in one call: to look for equal ones takes longer."""


class Design(Spec, family="design"):
    """Hands out levels. A new design gives `_assign`; the arguments are checked here."""

    def assign(
        self, levels: Levels, *, seed: int, window: int, names: Sequence[str], two_level: Sequence[bool]
    ) -> NDArray[np.float64]:
        """The levels [N, K] of N replicas (rows) in K knobs; column k is a permutation of `levels[k]`.

        Args:
            levels: for each knob its N levels, in coordinate units, ascending (see `Spread.levels`).
            seed: of the run.
            window: number of the window; or of the step, for a design that changes every step.
            names: of the knobs, each once.
            two_level: for each knob whether its spread is made for designs of signs (`Spread.two_level`).

        Raises:
            ConfigError: the arguments differ in length, a name comes twice, or a spread does not suit.
        """
        if not levels:
            raise ConfigError("a design needs at least one knob; got no levels")
        if not len(levels) == len(names) == len(two_level):
            raise ConfigError(
                f"levels, names and two_level go knob by knob; got {len(levels)}, {len(names)} and {len(two_level)}"
            )
        if len(set(names)) < len(names):
            raise ConfigError(f"knob names must differ, as designs are keyed by them; got {list(names)}")
        columns = [np.asarray(column, dtype=np.float64) for column in levels]
        if len({column.shape for column in columns}) > 1 or columns[0].ndim != 1 or columns[0].size == 0:
            raise ConfigError(
                f"every knob needs the same number of levels, one a replica; got the shapes "
                f"{dict(zip(names, (column.shape for column in columns), strict=True))}"
            )
        return np.asarray(self._assign(columns, seed, window, names, two_level), dtype=np.float64)

    @abstractmethod
    def _assign(self, levels: Levels, seed: int, window: int, names: Sequence[str], two_level: Sequence[bool]) -> Array:
        """`assign` for arguments that were checked."""


@register
class Permutation(Design):
    """An independent random permutation per knob and window; the paper's "reassign".

    A knob's permutation depends on its own name only, so that adding a knob leaves the others' alone.
    Source: Cheng et al. 2026, arXiv 2604.24708.

    >>> levels = [np.array([-1.0, 0.0, 1.0])] * 2
    >>> Permutation().assign(levels, seed=0, window=3, names=["rate", "decay"], two_level=[False, False])
    array([[-1., -1.],
           [ 1.,  0.],
           [ 0.,  1.]])
    """

    def _assign(self, levels: Levels, seed: int, window: int, names: Sequence[str], two_level: Sequence[bool]) -> Array:
        orders = [_orders(1, len(levels[0]), seed, window, name)[0] for name in names]
        return np.column_stack([column[order] for column, order in zip(levels, orders, strict=True)])


@register
class Hadamard(Design):
    """Orthogonal columns: each knob's levels follow another random column of a Hadamard matrix, so that K < N
    effects are told apart as if each knob had been varied alone.

    In each window the columns, their signs and the order of the replicas are drawn anew.

    - N a multiple of 4 (52, 92, 100 and 116 excepted): exactly orthogonal while K < N. With K >= N some knobs
      share a column (they are *aliased*: only their sum, or difference, is seen), others in each window, so
      that an estimate with memory tells them apart.
    - Other N: no such matrix exists; each knob gets its levels in a random order, the least correlated of
      `FALLBACK_DRAWS` draws.
    - `foldover`: every replica has a mirror image with all its levels negated, which keeps even-order effects
      (curvature, products of two knobs) out of the slopes. Takes N >= 2 K; N is 2, 4 or a multiple of 8.

    Source: Plackett & Burman 1946, Biometrika 33(4); Box & Wilson 1951 for the foldover.

    >>> levels = [np.array([-1.0, -1.0, 1.0, 1.0])] * 3
    >>> names = ["rate", "decay", "dropout"]
    >>> design = Hadamard().assign(levels, seed=0, window=3, names=names, two_level=[True] * 3)
    >>> design.T @ design
    array([[4., 0., 0.],
           [0., 4., 0.],
           [0., 0., 4.]])
    """

    foldover: bool = False

    def _assign(self, levels: Levels, seed: int, window: int, names: Sequence[str], two_level: Sequence[bool]) -> Array:
        for column, name, suited in zip(levels, names, two_level, strict=True):
            if not suited and column.any():
                raise ConfigError(
                    f"knob {name!r} has a spread of more than two levels, which Hadamard cannot hand out; "
                    f"use TwoLevel or OneSided for it, or the design Permutation or LatinHypercube"
                )
        n, knobs = len(levels[0]), len(names)
        order = n // 2 if self.foldover else n
        if self.foldover:
            if n % 2 or not exists(order):
                raise ConfigError(
                    f"a foldover takes 2, 4 or a multiple of 8 replicas (but not 104); got {n}; "
                    f"use foldover=False or another number of replicas"
                )
            if 2 * knobs > n:
                raise ConfigError(
                    f"a foldover takes two replicas a knob; got {n} for {knobs} knobs ({list(names)}); "
                    f"use foldover=False or {2 * knobs} replicas"
                )
        elif n <= 2 or not exists(order):
            return _least_correlated(levels, seed, window, names)
        # The first column is constant: only a foldover, which negates it in the mirror images, can use it.
        skipped = 0 if self.foldover else 1
        width = order - skipped
        raw = _raw(n + width + 2 * knobs, seed, window, "hadamard", *names)
        row_keys, column_keys, knob_keys, sign_keys = np.split(raw, [n, n + width, n + width + knobs])
        rows, columns = _order(row_keys), _first(column_keys, min(knobs, width))
        # the knobs are shuffled too: else knobs k and k + width would be aliased in every window
        place = np.empty(knobs, dtype=np.int64)
        place[_order(knob_keys)] = np.arange(knobs) % width
        within = rows % order if self.foldover else rows
        upper = (entries(order, within, columns[place] + skipped) > 0) == (_signs(sign_keys) > 0)
        if self.foldover:
            upper[rows >= order] ^= True
        design = np.empty((knobs, n))  # knob by knob in memory
        for own, column, above in zip(design, levels, upper.T.copy(), strict=True):
            low, high = column[: n // 2], column[n // 2 :]
            if (low == low[0]).all() and (high == high[0]).all():  # two levels: who is which does not matter
                # By index and not by mask: signs in random order are what a processor cannot foresee.
                np.take(np.array([low[0], high[0]]), above.view(np.int8), out=own, mode="clip")
            else:
                own[~above], own[above] = low, high
        return design.T


@register
class LatinHypercube(Design):
    """Independent permutations, as in `Permutation`, but the best of several draws: the one whose two closest
    replicas are farthest apart (maximin), each knob measured in units of its largest level.

    For graded spreads (`Symmetric`, `Geometric`): each knob's levels are all used once, and the replicas fill
    the space between them. Source: McKay, Beckman & Conover 1979; Morris & Mitchell 1995 for maximin.

    >>> levels = [np.linspace(-1, 1, 5)] * 2
    >>> names = ["rate", "decay"]
    >>> design = LatinHypercube().assign(levels, seed=0, window=3, names=names, two_level=[False] * 2)
    >>> np.sort(design, axis=0)[:, 1].tolist()
    [-1.0, -0.5, 0.0, 0.5, 1.0]
    """

    draws: int = Field(default=16, ge=1, le=10_000)

    def _assign(self, levels: Levels, seed: int, window: int, names: Sequence[str], two_level: Sequence[bool]) -> Array:
        n = len(levels[0])
        orders = np.stack([_orders(self.draws, n, seed, window, name) for name in names], axis=-1)
        units = [column / (np.abs(column).max() or 1.0) for column in levels]
        pairs = np.triu_indices(n, k=1)
        best, widest = 0, -1.0
        for draw in range(self.draws if n > 1 else 1):
            # squares are added knob by knob, not by a matrix product, whose rounding differs between machines
            squared = np.zeros(len(pairs[0]))
            for k, unit in enumerate(units):
                placed = unit[orders[draw, :, k]]
                squared += (placed[pairs[0]] - placed[pairs[1]]) ** 2
            closest = float(squared.min()) if n > 1 else 0.0
            if closest > widest:
                best, widest = draw, closest
        return np.column_stack([column[orders[best, :, k]] for k, column in enumerate(levels)])


@register
class Fixed(Design):
    """The same in every window: replica r always gets level (r - k) mod N of knob k.

    What is particular to a replica (its data, its machine) is then never told apart from its level: a control
    to compare the random designs with.

    >>> levels = [np.array([-1.0, 0.0, 1.0])] * 2
    >>> Fixed().assign(levels, seed=0, window=3, names=["rate", "decay"], two_level=[False, False])
    array([[-1.,  1.],
           [ 0., -1.],
           [ 1.,  0.]])
    """

    def _assign(self, levels: Levels, seed: int, window: int, names: Sequence[str], two_level: Sequence[bool]) -> Array:
        return np.column_stack([np.roll(column, k) for k, column in enumerate(levels)])


def mirrored(pairs: int, *, seed: int, window: int, names: Sequence[str]) -> NDArray[np.float64]:
    """Signs [2 pairs, K] of which rows 2 i and 2 i + 1 are opposite in every column: a foldover, pair by pair.

    Columns are orthogonal where a Hadamard matrix of K columns or more fits into the pairs a whole number of times.
    Elsewhere they are cut from the next larger one: the product of two columns, of `pairs` terms, is then at most the
    number of rows that were left out, which is 1 to 3 (more only in the gaps of `hdet.hparams.hadamard`).

    >>> mirrored(2, seed=0, window=3, names=["dropout", "smoothing"])
    array([[ 1., -1.],
           [-1.,  1.],
           [-1., -1.],
           [ 1.,  1.]])
    """
    knobs = len(names)
    fitting = [m for m in range(knobs, pairs + 1) if pairs % m == 0 and exists(m)]
    order = max(fitting) if fitting else order_from(max(pairs, knobs))
    rows = pairs if fitting else order
    raw = _raw(rows + order + pairs + knobs, seed, window, "mirrored", *names)
    row_keys, column_keys, pair_keys, knob_keys = np.split(raw, np.cumsum([rows, order, pairs]))
    half = entries(order, _order(row_keys)[:pairs] % order, _order(column_keys)[:knobs]) * _signs(knob_keys)
    half = half * _signs(pair_keys)[:, None]  # which of a pair is up, so that the first is not always
    return np.stack([half, -half], axis=1).reshape(2 * pairs, knobs).astype(np.float64)


def uniform(count: int, *, seed: int, window: int, purpose: str, names: Sequence[str] = ()) -> NDArray[np.float64]:
    """[count] numbers in [0, 1) that depend on nothing but the arguments, the same on every machine."""
    return (_raw(count, seed, window, purpose, *names) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _signs(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    return np.where(keys >> np.uint64(63), 1, -1)


def _least_correlated(levels: Levels, seed: int, window: int, names: Sequence[str]) -> NDArray[np.float64]:
    """Random orders, the draw whose most correlated pair of knobs is least so. Lower levels count as -1,
    upper as +1 and an odd middle as 0, so that the correlations are whole numbers, the same on every machine.
    """
    n, knobs = len(levels[0]), len(names)
    draws = FALLBACK_DRAWS if knobs > 1 else 1
    orders = np.stack([_orders(draws, n, seed, window, name) for name in names], axis=-1)
    signs = np.sign(2 * orders - (n - 1))
    products = np.abs(np.einsum("dnj,dnk->djk", signs, signs))
    products[:, np.arange(knobs), np.arange(knobs)] = 0
    best = int(np.argmin(products.max(axis=(1, 2))))
    return np.column_stack([column[orders[best, :, k]] for k, column in enumerate(levels)])


def _orders(draws: int, n: int, seed: int, window: int, name: str) -> NDArray[np.int64]:
    """`draws` random permutations [draws, n] for a knob and window; the first is the same for any `draws`."""
    return _order(_raw(draws * n, seed, window, "order", name).reshape(draws, n))


def _order(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    if keys.shape[-1] <= FEW:
        return np.argsort(keys, axis=-1, kind="stable")
    order = np.argsort(keys, axis=-1)
    # As good as never are two words equal; then alone the slower sort, which keeps their order, says something else.
    ordered = np.take_along_axis(keys, order, axis=-1)
    tied = bool((ordered[..., 1:] == ordered[..., :-1]).any())
    return np.argsort(keys, axis=-1, kind="stable") if tied else order


def _first(keys: NDArray[np.uint64], count: int) -> NDArray[np.int64]:
    """`_order(keys)[:count]`; of thousands of columns a few knobs take a few, and no more are put in order."""
    if count >= len(keys):
        return _order(keys)
    least = np.argpartition(keys, count)[: count + 1]
    least = least[np.argsort(keys[least])]
    ordered = keys[least]
    tied = bool((ordered[1:] == ordered[:-1]).any())
    return _order(keys)[:count] if tied else least[:count]


def _raw(count: int, seed: int, window: int, purpose: str, *names: str) -> NDArray[np.uint64]:
    """`count` random words that depend on nothing but the arguments, and on every one of them."""
    # lengths are hashed with the names, so that ("ab", "c") and ("a", "bc") differ
    text = f"{seed}:{window}:{purpose}" + "".join(f":{len(name)}:{name}" for name in names)
    digest = hashlib.blake2b(text.encode(), digest_size=16, person=b"hdet.design").digest()
    return np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)
