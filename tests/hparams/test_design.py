"""The laws of designs: permutations of levels, orthogonality, and randomness that depends on nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hdet.errors import ConfigError
from hdet.hparams import design as designs
from hdet.hparams.design import Design, Fixed, Hadamard, LatinHypercube, Permutation, mirrored
from hdet.hparams.hadamard import hadamard, order_from
from hdet.hparams.spread import OneSided, Symmetric, TwoLevel

DESIGNS: list[Design] = [Permutation(), Hadamard(), Hadamard(foldover=True), LatinHypercube(draws=4), Fixed()]
each_design = pytest.mark.parametrize("design", DESIGNS, ids=repr)


def draw(
    design: Design, n: int, knobs: int | Sequence[str], seed: int = 0, window: int = 0, graded: bool = False
) -> NDArray[np.float64]:
    names = [f"knob {k}" for k in range(knobs)] if isinstance(knobs, int) else list(knobs)
    levels = (Symmetric(0.5) if graded else TwoLevel(0.5)).levels(n)
    return design.assign(
        [levels] * len(names), seed=seed, window=window, names=names, two_level=[not graded] * len(names)
    )


@each_design
@given(
    eighths=st.integers(1, 4),
    widths=st.lists(st.floats(0.01, 10), min_size=1, max_size=4),
    seed=st.integers(-(2**70), 2**70),
    window=st.integers(0, 2**40),
)
@settings(max_examples=40)
def test_columns_are_permutations_of_the_levels(
    design: Design, eighths: int, widths: list[float], seed: int, window: int
) -> None:
    n = 8 * eighths
    spreads = [TwoLevel(width) if k % 2 else OneSided(width) for k, width in enumerate(widths)]
    levels = [spread.levels(n) for spread in spreads]
    names = [f"knob {k}" for k in range(len(spreads))]
    assigned = design.assign(levels, seed=seed, window=window, names=names, two_level=[True] * len(names))
    assert assigned.shape == (n, len(names))
    for k, column in enumerate(levels):
        np.testing.assert_array_equal(np.sort(assigned[:, k]), column)


@pytest.mark.parametrize("design", [Permutation(), LatinHypercube(draws=4), Fixed()], ids=repr)
@given(n=st.integers(2, 20), knobs=st.integers(1, 6), window=st.integers(0, 10**6))
@settings(max_examples=40)
def test_graded_levels_are_permuted_too(design: Design, n: int, knobs: int, window: int) -> None:
    assigned = draw(design, n, knobs, window=window, graded=True)
    np.testing.assert_array_equal(np.sort(assigned, axis=0), np.tile(Symmetric(0.5).levels(n)[:, None], (1, knobs)))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 7, 9, 10, 52])
def test_hadamard_permutes_levels_for_other_numbers_of_replicas(n: int) -> None:
    levels = TwoLevel(0.5).levels(n) if n > 1 else np.zeros(1)
    names = ["a", "b", "c"]
    assigned = Hadamard().assign([levels] * 3, seed=1, window=2, names=names, two_level=[True] * 3)
    np.testing.assert_array_equal(np.sort(assigned, axis=0), np.tile(levels[:, None], (1, 3)))


@pytest.mark.parametrize("design", [Permutation(), Hadamard(), LatinHypercube()], ids=repr)
def test_seed_window_and_name_each_matter(design: Design) -> None:
    base = draw(design, 16, ["a", "b"], graded=not isinstance(design, Hadamard))
    for others in ({"seed": 1}, {"window": 1}, {"knobs": ["a", "c"]}):
        arguments = {"knobs": ["a", "b"], **others}
        again = draw(design, 16, graded=not isinstance(design, Hadamard), **arguments)  # type: ignore[arg-type]
        assert not np.array_equal(base, again), others


@given(
    names=st.lists(st.text(max_size=5), min_size=1, max_size=5, unique=True),
    more=st.text(min_size=6, max_size=8),
    where=st.integers(0, 5),
    n=st.integers(2, 12),
)
@settings(max_examples=60)
def test_adding_a_knob_leaves_other_permutations_alone(names: list[str], more: str, where: int, n: int) -> None:
    before = draw(Permutation(), n, names, seed=3, window=4, graded=True)
    longer = [*names[:where], more, *names[where:]]
    after = draw(Permutation(), n, longer, seed=3, window=4, graded=True)
    np.testing.assert_array_equal(before, after[:, [longer.index(name) for name in names]])


def test_permutations_are_uniform() -> None:
    n, windows = 4, 4000
    counts = np.zeros((n, n))
    levels = np.arange(n, dtype=float)
    for window in range(windows):
        column = Permutation().assign([levels], seed=0, window=window, names=["a"], two_level=[False])[:, 0]
        counts[np.arange(n), column.astype(int)] += 1
    # a cell's standard deviation is 27: five of them, over 16 cells
    assert np.abs(counts - windows / n).max() < 5 * np.sqrt(windows * (1 / n) * (1 - 1 / n))


@pytest.mark.parametrize("order", [order for order in range(1, 129) if order in (1, 2) or order % 4 == 0])
def test_hadamard_matrices_are_what_they_are_called(order: int) -> None:
    matrix = hadamard(order)
    assert (matrix is None) == (order in (52, 92, 100, 116))
    if matrix is not None:
        assert set(np.unique(matrix)) <= {-1, 1}
        assert (matrix[:, 0] == 1).all()
        np.testing.assert_array_equal(matrix.T @ matrix, order * np.eye(order, dtype=int))


@pytest.mark.parametrize("n", [4, 8, 12, 16, 20, 24, 28, 32, 36, 40])
@given(seed=st.integers(0, 2**32), window=st.integers(0, 2**32), data=st.data())
@settings(max_examples=10)
def test_hadamard_columns_are_orthogonal(n: int, seed: int, window: int, data: st.DataObject) -> None:
    knobs = data.draw(st.integers(1, n - 1))
    signs = 2 * draw(Hadamard(), n, knobs, seed, window)
    np.testing.assert_array_equal(signs.T @ signs, n * np.eye(knobs))


def test_hadamard_signs_and_rows_are_random() -> None:
    total = sum(draw(Hadamard(), 8, 3, window=window) for window in range(1000))
    # each entry is a sum of 1000 fair +-0.5
    assert np.abs(total).max() < 5 * 0.5 * np.sqrt(1000)


def test_hadamard_signs_are_drawn_and_not_only_columns() -> None:
    # three columns of order 4 multiply to a constant row by row: +1 or -1 as the signs fall, and fairly so
    products = [np.prod(2 * draw(Hadamard(), 4, 3, window=window), axis=1) for window in range(400)]
    assert all(np.ptp(product) == 0 for product in products)
    assert abs(sum(product[0] for product in products)) < 5 * np.sqrt(400)


def test_aliased_knobs_differ_by_window() -> None:
    n, knobs = 4, 6
    seen = set()
    for window in range(100):
        gram = (2 * draw(Hadamard(), n, knobs, window=window)).T @ (2 * draw(Hadamard(), n, knobs, window=window))
        aliased = [pair for pair in combinations(range(knobs), 2) if gram[pair] != 0]
        assert len(aliased) == 3, "six knobs share three columns two by two"
        seen.update(aliased)
    assert seen == set(combinations(range(knobs), 2))


@pytest.mark.parametrize("n", [2, 4, 8, 16, 24, 32, 40])
@given(window=st.integers(0, 2**32), data=st.data())
@settings(max_examples=10)
def test_foldover_is_orthogonal_and_mirrored(n: int, window: int, data: st.DataObject) -> None:
    knobs = data.draw(st.integers(1, n // 2))
    signs = 2 * draw(Hadamard(foldover=True), n, knobs, window=window)
    np.testing.assert_array_equal(signs.T @ signs, n * np.eye(knobs))
    rows = sorted(map(tuple, signs))
    assert rows == sorted(map(tuple, -signs))
    for one, other in combinations(range(knobs), 2):
        # even-order effects are orthogonal to every slope
        np.testing.assert_array_equal(signs.T @ (signs[:, one] * signs[:, other]), np.zeros(knobs))


PAIRS = [(1, 1), (2, 2), (3, 1), (4, 3), (6, 2), (8, 8), (10, 2), (12, 9), (24, 24)]


@pytest.mark.parametrize(("pairs", "knobs"), PAIRS)
@given(window=st.integers(0, 2**32))
@settings(max_examples=10)
def test_mirrored_pairs_are_opposite_and_columns_orthogonal(pairs: int, knobs: int, window: int) -> None:
    """Where a Hadamard matrix fits into them; one column is always orthogonal to no other."""
    signs = mirrored(pairs, seed=1, window=window, names=[f"k{k}" for k in range(knobs)])
    assert signs.shape == (2 * pairs, knobs)
    assert set(np.unique(signs)) <= {-1.0, 1.0}
    np.testing.assert_array_equal(signs[0::2], -signs[1::2])
    np.testing.assert_array_equal(signs.T @ signs, 2 * pairs * np.eye(knobs))


@pytest.mark.parametrize(("pairs", "knobs"), [(3, 2), (5, 4), (6, 5), (7, 3), (9, 6), (13, 2), (51, 3)])
def test_mirrored_pairs_are_nearly_orthogonal_elsewhere(pairs: int, knobs: int) -> None:
    left = order_from(pairs) - pairs
    assert left <= 5
    for window in range(20):
        half = mirrored(pairs, seed=0, window=window, names=[f"k{k}" for k in range(knobs)])[0::2]
        products = half.T @ half - pairs * np.eye(knobs)
        assert np.abs(products).max() <= left


def test_in_mirrored_pairs_each_is_up_as_often_as_the_other_and_knobs_are_independent() -> None:
    for pairs in (1, 2, 3):
        drawn = np.stack([mirrored(pairs, seed=0, window=window, names=["a", "b"]) for window in range(2000)])
        first = drawn[:, 0::2]
        assert np.abs(first.mean(axis=0)).max() < 0.08
        assert np.abs((first[:, :, 0] * first[:, :, 1]).mean(axis=0)).max() < 0.08
        # A step says nothing of the next.
        assert np.abs((first[1:] * first[:-1]).mean(axis=0)).max() < 0.08


def test_mirrored_pairs_are_a_pure_function_of_seed_window_and_names() -> None:
    def draw(**changed: object) -> list[list[float]]:
        return mirrored(8, **{"seed": 0, "window": 0, "names": ["a", "b"], **changed}).tolist()  # type: ignore[arg-type]

    assert draw() == draw()
    assert draw() not in (draw(seed=1), draw(window=1), draw(names=["a", "c"]))


def test_foldover_says_what_it_takes() -> None:
    with pytest.raises(ConfigError, match=r"multiple of 8 .*got 12.*foldover=False"):
        draw(Hadamard(foldover=True), 12, 2)
    with pytest.raises(ConfigError, match="got 9"):
        draw(Hadamard(foldover=True), 9, 2)
    with pytest.raises(ConfigError, match=r"got 8 for 5 knobs.*10 replicas"):
        draw(Hadamard(foldover=True), 8, 5)


def test_hadamard_refuses_graded_levels_unless_they_are_nothing() -> None:
    with pytest.raises(ConfigError, match=r"'knob 0'.*TwoLevel.*Permutation"):
        draw(Hadamard(), 8, 2, graded=True)
    levels = [Symmetric(0.0).levels(8), TwoLevel(0.5).levels(8)]
    assigned = Hadamard().assign(levels, seed=0, window=0, names=["off", "on"], two_level=[False, True])
    assert not assigned[:, 0].any()


def test_the_fallback_is_less_correlated_than_chance() -> None:
    def worst(design: Design, window: int) -> float:
        signs = 2 * draw(design, 6, 3, window=window)
        return float(np.abs(signs.T @ signs - 6 * np.eye(3)).max())

    # 6 is a pair of knobs that cannot be told apart, 2 the least that six replicas allow
    assert all(worst(Hadamard(), window) == 2 for window in range(50))
    assert any(worst(Permutation(), window) == 6 for window in range(50))


def test_latin_hypercube_spreads_the_replicas_out() -> None:
    def closest(design: Design, window: int) -> float:
        placed = draw(design, 8, 3, window=window, graded=True)
        return min(float(np.sum((a - b) ** 2)) for a, b in combinations(placed, 2))

    pairs = [(closest(Permutation(), window), closest(LatinHypercube(), window)) for window in range(20)]
    assert all(best >= first for first, best in pairs), "the first draw is the permutation's"
    assert sum(best for _, best in pairs) > 1.5 * sum(first for first, _ in pairs)


def test_latin_hypercube_weighs_knobs_alike() -> None:
    narrow, wide = Symmetric(1e-3).levels(6), Symmetric(10.0).levels(6)
    names = ["a", "b"]
    mixed = LatinHypercube().assign([narrow, wide], seed=0, window=0, names=names, two_level=[False] * 2)
    alike = LatinHypercube().assign([wide, wide], seed=0, window=0, names=names, two_level=[False] * 2)
    np.testing.assert_allclose(mixed * [1e4, 1.0], alike)


def test_fixed_rotates_by_knob_and_ignores_the_window() -> None:
    assigned = draw(Fixed(), 3, 4, seed=1, window=2, graded=True)
    assert assigned.T.tolist() == [[-0.5, 0.0, 0.5], [0.5, -0.5, 0.0], [0.0, 0.5, -0.5], [-0.5, 0.0, 0.5]]
    np.testing.assert_array_equal(assigned, draw(Fixed(), 3, 4, seed=8, window=9, graded=True))


def test_the_stream_never_changes() -> None:
    """Golden: a run resumed under another version of NumPy or of this package draws the same designs."""
    levels = np.arange(8, dtype=float)
    drawn = Permutation().assign([levels], seed=42, window=7, names=["learning_rate"], two_level=[False])
    assert drawn[:, 0].tolist() == [6.0, 3.0, 0.0, 4.0, 5.0, 7.0, 2.0, 1.0]
    signs = 2 * draw(Hadamard(), 8, ["learning_rate", "weight_decay"], seed=42, window=7)
    assert signs.T.tolist() == [[1, -1, -1, -1, -1, 1, 1, 1], [-1, -1, 1, 1, -1, -1, 1, 1]]


@pytest.mark.parametrize(
    ("levels", "names", "two_level", "message"),
    [
        ([], [], [], "at least one knob"),
        ([np.zeros(2)], ["a", "b"], [True], "got 1, 2 and 1"),
        ([np.zeros(2)] * 2, ["a", "a"], [True] * 2, "names must differ"),
        ([np.zeros(2), np.zeros(3)], ["a", "b"], [True] * 2, "same number of levels"),
        ([np.zeros(0)], ["a"], [True], "same number of levels"),
    ],
)
@each_design
def test_arguments_that_do_not_fit_are_refused(
    design: Design, levels: list[NDArray[np.float64]], names: list[str], two_level: list[bool], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        design.assign(levels, seed=0, window=0, names=names, two_level=two_level)


@pytest.mark.parametrize("largest", [4, 2**63])
@pytest.mark.parametrize("count", [1, 3, 50])
def test_the_first_of_an_order_are_those_of_the_whole_order(largest: int, count: int) -> None:
    """Ties included, of which words below 4 have many."""
    for seed in range(20):
        keys = np.random.default_rng(seed).integers(0, largest, 50, dtype=np.uint64)
        assert designs._first(keys, count).tolist() == designs._order(keys)[:count].tolist()
