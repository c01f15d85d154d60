"""Weights averaged over a window."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hdet
from hdet.errors import ConfigError
from hdet.replicas.average import Averages, RunningMean
from hdet.replicas.moving import Moving
from hdet.schedules import Constant


@settings(max_examples=40)
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


@pytest.mark.parametrize("size", [3, 100], ids=["joined", "alone"])
def test_it_goes_on_where_weights_come_to_lie_in_another_way(size: int) -> None:
    """As where an optimizer gives a parameter other memory."""
    weights = [torch.ones(size, size)]
    mean = RunningMean(lambda: list(weights))
    for _ in range(3):
        mean.add()
    weights[0] = torch.full((size, size), 5.0).t()
    assert not weights[0].is_contiguous()
    mean.add()
    torch.testing.assert_close(mean.mean()[0], torch.full((size, size), 2.0))


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
    averages = Averages(Moving(replicas.hosts))
    assert averages.state_dict() == {}
    one = averages.follow(0, 2)
    assert averages.follow(0, 2) is one
    assert averages.follow(1, 2) is not one
    assert averages.follow(0, 3) is not one
    averages.add()
    averages.add()
    assert [mean.count for mean in (one, averages.follow(0, 3))] == [1, 0]
    other = Averages(Moving(replicas.hosts))
    kept = other.follow(0, 2)
    other.load_state_dict(averages.state_dict())
    assert kept.count == 1
    averages.reset(7)
    assert one.count == 0


@settings(max_examples=40)
@given(steps=st.integers(1, 3000))
def test_without_a_stride_a_long_window_is_averaged_at_128_to_255_of_its_steps(steps: int) -> None:
    weight = torch.zeros(1)
    averages = Averages(SimpleNamespace(values=lambda host: [weight], evaluates_average=False))  # type: ignore[arg-type]
    by_length, every = averages.follow(0, None), averages.follow(0, 3)
    averages.reset(steps)
    for _ in range(steps):
        averages.add()
    assert every.count == steps // 3
    assert by_length.count == steps if steps < 256 else 128 <= by_length.count < 256
    assert averages.strides == ([None, 3] if steps < 512 else [3, None])


Run = Callable[[int | None, int, int], hdet.Engine]


@pytest.fixture
def start(problem: Any) -> Run:
    def make(stride: int | None, window: int, total: int) -> hdet.Engine:
        model = problem.model()
        line = hdet.evidence.Line(stride=stride, read_average_above=None, preview=0.0)
        knobs = [
            hdet.LearningRate(schedule=Constant(0.01), evidence=line),
            hdet.WeightDecay(evidence=hdet.evidence.Analytic(stride=stride)),
        ]
        home = hdet.micro_batches(model, torch.optim.AdamW(model.parameters(), lr=0.01), 1)
        return hdet.Engine(home, knobs, window=window, total_steps=total, signal=problem.probe())

    return make


def told(engine: hdet.Engine) -> list[Any]:
    return [(record.estimates, record.moves) for record in engine.history]


@pytest.mark.parametrize(("window", "stride"), [(255, 1), (256, 2), (700, 5)])
def test_by_the_windows_length_is_the_stride_it_comes_to_bit_for_bit(
    window: int, stride: int, start: Run, train: Any
) -> None:
    by_length, given = (start(own, window, 2 * window) for own in (None, stride))
    train(by_length)
    train(given)
    assert told(by_length) == told(given)
    estimates, _ = told(given)[0]
    assert estimates["learning_rate"]["averaged"]["stderr"] > 0.0


def test_by_the_windows_length_a_resumed_run_and_one_that_ends_early_go_on(
    start: Run, train: Any, assert_same: Any
) -> None:
    whole, taken_up, given = start(None, 600, 600), start(None, 600, 600), start(4, 600, 600)
    train(whole, 303)
    taken_up.load_state_dict(whole.state_dict())
    for engine in (whole, taken_up, given):
        train(engine, 501)
        engine.finish()
    assert told(taken_up) == told(whole) == told(given)
    assert_same(taken_up.state_dict()["converged"], whole.state_dict()["converged"])


def test_what_is_followed_stays_the_same_from_window_to_window(problem: Any) -> None:
    model = problem.model()
    moving = Moving([(model, torch.optim.SGD(model.parameters(), lr=0.1))])
    values = moving.values()
    moving.open()
    assert moving.values() is values
    weight = model[0].weight
    weight.data = weight.data.view(3, 8)  # another shape in the same memory
    moving.open()
    assert [value.shape for value in moving.values()] == [parameter.shape for parameter in model.parameters()]
    weight.requires_grad_(False)
    moving.open()
    assert len(moving.values()) == len(values)  # the optimizer may move it all the same
    model[0].weight = torch.nn.Parameter(weight.detach().clone())
    moving.open()
    assert moving.values()[0].data_ptr() == model[0].weight.data_ptr()


def test_a_mean_that_was_saved_by_its_stride_is_taken_up_where_the_window_gives_the_same(
    problem: Any, train: Any
) -> None:
    """As states are that were saved when the default was a stride of 1."""

    def run(stride: int | None) -> hdet.Engine:
        model = problem.model()
        probe = hdet.Probe(problem.probe().loss, problem.probe().batches, at="average", stride=stride)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        home = hdet.replicate(model, optimizer, n=2)
        return hdet.Engine(home, [hdet.LearningRate()], window=10, total_steps=20, signal=probe)

    before, after = run(1), run(None)
    train(before, 5)
    after.load_state_dict(before.state_dict())
    means = after.cycle.averages.means
    assert [mean.count for mean in means.values()] == [5, 5]


def test_on_the_host_it_is_the_same_mean() -> None:
    """`meta` stands for a device that is not the tensors' own: what is held there has no values."""
    weight = torch.zeros(3, dtype=torch.bfloat16)
    here, host, elsewhere = (RunningMean(lambda: [weight], 2, device) for device in (None, "cpu", "meta"))
    for step in range(9):
        weight.fill_(float(step))
        for mean in (here, host, elsewhere):
            mean.add()
    assert torch.equal(here.mean()[0], host.mean()[0])
    assert here.mean()[0] is here.values[0]  # no copy where there is no need
    assert (elsewhere.values[0].device.type, elsewhere.values[0].dtype) == ("meta", torch.float32)
    again = RunningMean(lambda: [weight], 2, "meta")
    again.load_state_dict(here.state_dict())
    assert again.values[0].device.type == "meta"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_of_weights_on_a_gpu_the_mean_lies_on_the_host() -> None:
    weight = torch.zeros(3, device="cuda")
    here, host = (RunningMean(lambda: [weight], 1, device) for device in (None, "cpu"))
    for step in range(5):
        weight.fill_(float(step))
        here.add()
        host.add()
    assert (here.values[0].device.type, host.values[0].device.type) == ("cuda", "cpu")
    assert torch.equal(here.mean()[0].cpu(), host.mean()[0])


def test_an_engine_that_keeps_averages_on_the_host_runs_the_same(problem: Any, train: Any, assert_same: Any) -> None:
    def run(**options: Any) -> tuple[hdet.Engine, list[Any]]:
        model = problem.model()
        knob = hdet.LearningRate(
            schedule=Constant(0.01), evidence=hdet.evidence.Line(stride=2, read_average_above=-1e9)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        made = hdet.Engine(
            hdet.micro_batches(model, optimizer, 2), [knob], window=5, total_steps=15, signal=problem.probe(), **options
        )
        train(made)
        return made, [record.estimates for record in made.history]

    device, host = run(), run(averages="host")
    assert host[1] == device[1]
    assert_same(host[0].hosts[0][0].state_dict(), device[0].hosts[0][0].state_dict())
    assert host[0].cycle.averages.follow(0, 2).values[0].device == torch.device("cpu")
    with pytest.raises(ConfigError, match="averages must be 'device' or 'host', got 'disk'"):
        run(averages="disk")


def test_the_engine_says_where_averages_lie(problem: Any) -> None:
    model = problem.model()
    replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=2)
    for option, device in (("device", None), ("host", "cpu")):
        made = hdet.Engine(replicas, [hdet.LearningRate()], averages=option)  # type: ignore[arg-type]
        assert made.cycle.averages.device == device
