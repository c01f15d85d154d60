"""Weights averaged over a window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hdet
from hdet.replicas.average import Averages, RunningMean


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=30), stride=st.integers(1, 4))
def test_it_is_the_mean_of_every_stride_th_step(values: list[float], stride: int) -> None:
    weight = torch.zeros(2)
    mean = RunningMean(lambda: [weight], stride)
    for value in values:
        weight.fill_(value)
        mean.add()
    taken = values[stride - 1 :: stride] or values[-1:]
    torch.testing.assert_close(mean.mean()[0], torch.full((2,), sum(taken) / len(taken)), atol=1e-4, rtol=1e-5)
    assert mean.count == len(values) // stride


def test_reset_starts_anew_even_after_a_nan() -> None:
    weight = torch.tensor([float("nan")])
    mean = RunningMean(lambda: [weight])
    mean.add()
    mean.reset()
    assert mean.mean()[0] is weight
    weight.fill_(2.0)
    mean.add()
    assert mean.mean()[0].item() == 2.0


def test_half_precision_is_averaged_in_single() -> None:
    """In bfloat16 a mean over 1000 steps would stand still."""
    weight = torch.ones(1, dtype=torch.bfloat16)
    mean = RunningMean(lambda: [weight])
    for step in range(1000):
        weight.fill_(float(step % 2))
        mean.add()
    assert mean.mean()[0].dtype == torch.float32
    assert mean.mean()[0].item() == pytest.approx(0.5, abs=1e-5)


def test_its_state_goes_on_where_it_was_and_is_a_copy() -> None:
    weight = torch.zeros(3)

    def add(mean: RunningMean, values: Any) -> None:
        for value in values:
            weight.fill_(float(value))
            mean.add()

    whole, first, second = (RunningMean(lambda: [weight], 2) for _ in range(3))
    add(whole, range(9))
    add(first, range(5))
    state = first.state_dict()
    second.load_state_dict(state)
    add(second, range(5, 9))
    assert torch.equal(second.mean()[0], whole.mean()[0])
    again = RunningMean(lambda: [weight], 2)
    again.load_state_dict(state)
    assert torch.equal(again.mean()[0], first.mean()[0])
    assert first.count == 2


def test_of_a_window_just_opened_no_weights_are_saved() -> None:
    mean = RunningMean(lambda: [torch.ones(1000)])
    mean.add()
    mean.reset()
    assert mean.state_dict()["values"] == []


def test_who_asks_for_the_same_gets_the_same(problem: Any) -> None:
    model = problem.model()
    replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=2)
    averages = Averages(replicas.hosts)
    assert averages.state_dict() == {}
    one = averages.follow(0, 2)
    assert averages.follow(0, 2) is one
    assert averages.follow(1, 2) is not one
    assert averages.follow(0, 3) is not one
    averages.add()
    averages.add()
    assert [mean.count for mean in (one, averages.follow(0, 3))] == [1, 0]
    other = Averages(replicas.hosts)
    kept = other.follow(0, 2)
    other.load_state_dict(averages.state_dict())
    assert kept.count == 1
    averages.reset()
    assert one.count == 0
