"""Batches are pure functions of (seed, stream, step, replica)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.app.tasks.draws import draws

seeds = st.integers(0, 2**63 - 1)
counters = st.integers(0, 2**40)


@given(seed=seeds, step=counters, replica=counters, below=st.integers(1, 2**40))
def test_a_draw_is_in_range_repeats_and_leaves_the_global_generator_alone(
    seed: int, step: int, replica: int, below: int
) -> None:
    before = np.random.get_state()[1].copy()  # type: ignore[index, union-attr]
    first = draws(16, below=below, seed=seed, stream="train", step=step, replica=replica)
    again = draws(16, below=below, seed=seed, stream="train", step=step, replica=replica)
    assert (first == again).all()
    assert first.min() >= 0
    assert first.max() < below
    assert (np.random.get_state()[1] == before).all()  # type: ignore[index]


@given(seed=seeds, step=counters, replica=counters)
def test_a_longer_draw_begins_with_the_shorter_one(seed: int, step: int, replica: int) -> None:
    short = draws(3, below=2**40, seed=seed, stream="train", step=step, replica=replica)
    long = draws(9, below=2**40, seed=seed, stream="train", step=step, replica=replica)
    assert (long[:3] == short).all()


@pytest.mark.parametrize("changed", [{"seed": 1}, {"stream": "probe"}, {"step": 1}, {"replica": 1}])
def test_each_argument_gives_other_draws(changed: dict[str, object]) -> None:
    base = {"seed": 0, "stream": "train", "step": 0, "replica": 0}
    one = draws(64, below=2**40, **base)  # type: ignore[arg-type]
    other = draws(64, below=2**40, **{**base, **changed})  # type: ignore[arg-type]
    assert not np.intersect1d(one, other).size


def test_long_draws_of_neighbouring_steps_and_replicas_do_not_overlap() -> None:
    """Philox counts in its lowest word; steps and replicas sit above it, out of its reach."""
    streams = [
        draws(4096, below=2**62, seed=0, stream="train", step=step, replica=replica)
        for step in range(3)
        for replica in range(3)
    ]
    assert len(np.unique(np.concatenate(streams))) == 9 * 4096


def test_draws_are_uniform() -> None:
    counts = np.bincount(draws(100_000, below=10, seed=5, stream="train"), minlength=10)
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 30.0  # chi-square with 9 degrees of freedom: p < 0.0005


def test_the_stream_is_the_one_that_older_runs_saw() -> None:
    assert draws(4, below=1000, seed=7, stream="train", step=2, replica=1).tolist() == GOLDEN


GOLDEN = [988, 514, 245, 760]
