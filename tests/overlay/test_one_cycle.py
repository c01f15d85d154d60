"""OneCycleHDET where nothing is explored: OneCycleLR bit for bit."""

import copy
import gc
import io
import math
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_job import QUIET, course, optimizer
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, LinearLR, OneCycleLR, SequentialLR

import hdet
from hdet.errors import ConfigError, StepError

OWN = {"optimizer", "_exploration", "_declared", "_began", "_knob_fields", "_warmup"}
pytestmark = QUIET


# -- what PyTorch's own tests ask of OneCycleLR, at spread 0 --------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, ValueError),
        ({"total_steps": 0}, ValueError),
        ({"total_steps": -1}, ValueError),
        ({"total_steps": 1.5}, ValueError),
        ({"epochs": 10}, ValueError),
        ({"epochs": -1, "steps_per_epoch": 10}, ValueError),
        ({"epochs": 10, "steps_per_epoch": -1}, ValueError),
        ({"epochs": 1.5, "steps_per_epoch": 10}, ValueError),
        ({"total_steps": 10, "pct_start": 1.1}, ValueError),
        ({"total_steps": 10, "pct_start": -0.1}, ValueError),
        ({"total_steps": 10, "pct_start": 1}, ValueError),
        ({"total_steps": 10, "anneal_strategy": "CATS"}, ValueError),
        ({"total_steps": 10, "max_lr": [1e-3]}, ValueError),
        ({"total_steps": 10, "base_momentum": [0.1]}, ValueError),
        ({"total_steps": 10, "max_momentum": [0.1, 0.2, 0.3]}, ValueError),
        ({"total_steps": 10, "last_epoch": 3}, KeyError),
        ({"total_steps": 10, "bogus": 3}, TypeError),
    ],
)
def test_construction_errors_are_torch_s(arguments: dict[str, Any], error: type[Exception]) -> None:
    arguments = {"max_lr": 1e-3, **arguments}
    with pytest.raises(error) as theirs:
        OneCycleLR(optimizer(), **arguments)
    with pytest.raises(error) as ours:
        hdet.OneCycleHDET(optimizer(), **arguments)
    assert str(ours.value).replace("OneCycleHDET", "OneCycleLR") == str(theirs.value)


def test_what_is_no_optimizer_or_has_no_momentum_is_refused_as_by_torch() -> None:
    with pytest.raises(TypeError, match="is not an Optimizer"):
        hdet.OneCycleHDET([], 1e-3, total_steps=10)  # type: ignore[arg-type]
    rprop = torch.optim.Rprop([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="must support momentum or beta1"):
        hdet.OneCycleHDET(rprop, 1e-3, total_steps=10)
    assert hdet.OneCycleHDET(rprop, 1e-3, total_steps=10, cycle_momentum=False).total_steps == 10


def test_linear_annealing_by_hand() -> None:
    made = optimizer()
    scheduler = hdet.OneCycleHDET(
        made, 25, total_steps=10, div_factor=25, final_div_factor=1, pct_start=0.5, anneal_strategy="linear",
        base_momentum=1, max_momentum=22,
    )  # fmt: skip
    rates, momenta = (
        [1, 7, 13, 19, 25, 20.2, 15.4, 10.6, 5.8, 1],
        [22, 16.75, 11.5, 6.25, 1, 5.2, 9.4, 13.6, 17.8, 22],
    )
    for rate, momentum in zip(rates, momenta, strict=True):
        for group in made.param_groups:
            assert group["lr"] == pytest.approx(rate)
            assert group["momentum"] == pytest.approx(momentum)
        made.step()
        scheduler.step(torch.zeros(()))


def test_three_phases_by_hand() -> None:
    made = optimizer()
    scheduler = hdet.OneCycleHDET(
        made, 25, total_steps=10, div_factor=25, final_div_factor=10, pct_start=0.4, anneal_strategy="linear",
        three_phase=True, base_momentum=1, max_momentum=22,
    )  # fmt: skip
    rates, momenta = [1, 9, 17, 25, 17, 9, 1, 0.7, 0.4, 0.1], [22, 15, 8, 1, 8, 15, 22, 22, 22, 22]
    for rate, momentum in zip(rates, momenta, strict=True):
        assert made.param_groups[0]["lr"] == pytest.approx(rate)
        assert made.param_groups[0]["momentum"] == pytest.approx(momentum)
        scheduler.step()


def test_cosine_by_hand() -> None:
    made = optimizer()
    scheduler = hdet.OneCycleHDET(made, 25, total_steps=10, div_factor=25, final_div_factor=10, pct_start=0.3)

    def between(start: float, end: float, x: float) -> float:
        return end + (start - end) / 2 * (math.cos(x * math.pi) + 1)

    rates = [1, 13, 25, *(between(25, 0.1, x / 7) for x in range(1, 8))]
    for rate in rates:
        assert made.param_groups[1]["lr"] == pytest.approx(rate)
        scheduler.step()


def peaks(tensor: bool) -> st.SearchStrategy[Any]:
    one = st.floats(1e-8, 10)
    many = st.tuples(one, st.one_of(one, st.just(0.0))).map(list)
    return many.map(lambda rates: [torch.tensor(rate) for rate in rates]) if tensor else st.one_of(one, many)


def extents() -> st.SearchStrategy[dict[str, int]]:
    steps = st.integers(2, 40).map(lambda total: {"total_steps": total})
    epochs = st.tuples(st.integers(1, 6), st.integers(2, 6))
    return st.one_of(steps, epochs.map(lambda pair: {"epochs": pair[0], "steps_per_epoch": pair[1]}))


momenta = st.one_of(st.floats(0, 0.95), st.tuples(st.floats(0, 0.95), st.floats(0, 0.95)).map(list))


@settings(max_examples=80)
@given(
    kind=st.sampled_from(["sgd", "adamw"]),
    arguments=st.fixed_dictionaries(
        {
            "max_lr": st.one_of(peaks(tensor=False), peaks(tensor=True)),
            "pct_start": st.floats(0, 1),
            "anneal_strategy": st.sampled_from(["cos", "linear"]),
            "cycle_momentum": st.booleans(),
            "base_momentum": momenta,
            "max_momentum": momenta,
            "div_factor": st.floats(1, 1000),
            "final_div_factor": st.one_of(st.floats(1, 1e6), st.just(math.inf)),
            "three_phase": st.booleans(),
        }
    ),
    extent=extents(),
    done=st.one_of(st.none(), st.integers(0, 5)),
    plain_tensors=st.booleans(),
    extras=st.sampled_from([{}, {"spread": 0.2}, {"window": 3, "auto_lr": False}]),
)
def test_without_exploration_it_is_one_cycle_lr_bit_for_bit(
    kind: str, arguments: dict[str, Any], extent: dict[str, int], done: int | None, plain_tensors: bool,
    extras: dict[str, Any],
) -> None:  # fmt: skip
    """Rates, momenta, group entries, attributes, state; with spread 0, or one process to spread over.

    `done` steps are made by torch's scheduler first, and `last_epoch` goes on from there.
    """
    total = extent.get("total_steps") or extent["epochs"] * extent["steps_per_epoch"]

    def run(make: Callable[..., OneCycleLR], **more: Any) -> tuple[Any, Any]:
        made = optimizer(kind)
        if plain_tensors:
            for group in made.param_groups:
                group["params"] = [parameter.detach() for parameter in group["params"]]
        try:
            if done is not None:
                course(OneCycleLR(made, **arguments, **extent), min(done, total - 1))
                more["last_epoch"] = min(done, total - 1)
            scheduler = make(made, **arguments, **extent, **more)
            seen = course(scheduler, total - scheduler.last_epoch)
        except ZeroDivisionError as error:  # torch's, where a phase has no steps
            return type(error), None
        return seen, scheduler

    theirs, their = run(OneCycleLR)
    ours, our = run(hdet.OneCycleHDET, **extras)
    assert ours == theirs
    if their is not None:
        assert our.state_dict() == their.state_dict()
        assert {k: v for k, v in vars(our).items() if k not in OWN} == {
            k: v for k, v in vars(their).items() if k not in OWN
        }
        with pytest.raises(ValueError, match=f"Tried to step {total + 1} times"):
            our.step()


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_tensor_rates_stay_the_same_objects(kind: str) -> None:
    def run(make: Callable[..., OneCycleLR]) -> list[list[float]]:
        lr = torch.tensor(0.05)
        made: Optimizer
        if kind == "adamw":
            made = AdamW([nn.Parameter(torch.ones(3))], lr=lr, fused=True)
        else:
            made = SGD([nn.Parameter(torch.ones(3))], lr=lr, momentum=0.9)
        held = made.param_groups[0]["lr"]
        scheduler = make(made, 0.1, total_steps=8)
        seen = []
        for _ in range(8):
            seen.append([float(made.param_groups[0]["lr"])])
            assert made.param_groups[0]["lr"] is held
            assert scheduler.get_last_lr()[0] is not held
            made.step()
            scheduler.step()
        return seen

    assert run(hdet.OneCycleHDET) == run(OneCycleLR)


def test_a_state_makes_the_round_trip_both_ways() -> None:
    def run(first: Callable[..., OneCycleLR], second: Callable[..., OneCycleLR]) -> tuple[list[Any], list[Any]]:
        scheduler = first(optimizer(), 0.3, total_steps=20)
        course(scheduler, 8)
        other_optimizer = optimizer()
        other = second(other_optimizer, 7.0, total_steps=99, anneal_strategy="linear")
        buffer = io.BytesIO()
        torch.save((scheduler.state_dict(), scheduler.optimizer.state_dict()), buffer)
        buffer.seek(0)
        state, optimizer_state = torch.load(buffer, weights_only=True)
        other_optimizer.load_state_dict(optimizer_state)
        other.load_state_dict(state)
        for key, value in vars(scheduler).items():
            if key not in OWN:
                assert vars(other)[key] == value, key
        assert other.get_last_lr() == scheduler.get_last_lr()
        return course(scheduler, 11), course(other, 11)

    for pair in (
        (hdet.OneCycleHDET, hdet.OneCycleHDET),
        (OneCycleLR, hdet.OneCycleHDET),
        (hdet.OneCycleHDET, OneCycleLR),
    ):
        ours, theirs = run(*pair)  # type: ignore[arg-type]
        assert ours == theirs


def test_it_resumes_by_last_epoch() -> None:
    def run(make: Callable[..., OneCycleLR]) -> list[Any]:
        made = optimizer()
        course(make(made, 0.3, total_steps=20), 8)
        return course(make(made, 0.3, total_steps=20, last_epoch=8), 10)

    assert run(hdet.OneCycleHDET) == run(OneCycleLR)


@pytest.mark.parametrize("how", ["chained", "sequential", "epoch", "keyword"])
def test_chained_use_is_torch_s(how: str) -> None:
    def run(make: Callable[..., OneCycleLR]) -> list[Any]:
        made = optimizer()
        if how == "chained":
            first = ConstantLR(made, factor=0.5, total_iters=3)
            scheduler: Any = ChainedScheduler([first, make(made, 0.3, total_steps=20)])
        elif how == "sequential":
            parts = [LinearLR(made, start_factor=0.1, total_iters=4), make(made, 0.3, total_steps=20)]
            scheduler = SequentialLR(made, parts, milestones=[4])
        else:
            scheduler = make(made, 0.3, total_steps=20)
        seen = []
        for step in range(10):
            made.step()
            if how == "epoch":
                scheduler.step(step * 2)
            elif how == "keyword":
                scheduler.step(epoch=step)
            else:
                scheduler.step()
            seen.append([(group["lr"], group["momentum"]) for group in made.param_groups])
        return seen

    assert run(hdet.OneCycleHDET) == run(OneCycleLR)


def test_calls_in_the_wrong_order_warn() -> None:
    scheduler = hdet.OneCycleHDET(optimizer(), 0.3, total_steps=20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler.step(torch.zeros(()))
    assert ["before `optimizer.step()`" in str(warning.message) for warning in caught] == [True]
    assert caught[0].filename == __file__

    made = optimizer()
    scheduler = hdet.OneCycleHDET(made, 0.3, total_steps=20)
    made.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler.step(torch.zeros(()))
    assert not caught

    made = optimizer()
    scheduler = hdet.OneCycleHDET(made, 0.3, total_steps=20)
    made.step = lambda: None  # type: ignore[method-assign, assignment]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler.step()
    assert any("has been overridden" in str(warning.message) for warning in caught)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler.get_lr()
    assert any("get_last_lr" in str(warning.message) for warning in caught)


def test_it_is_pickled_and_copied_like_torch_s() -> None:
    scheduler = hdet.OneCycleHDET(optimizer(), 0.3, total_steps=20)
    course(scheduler, 5)
    for again in (pickle.loads(pickle.dumps(scheduler)), copy.deepcopy(scheduler)):
        assert again.state_dict() == scheduler.state_dict()
        assert isinstance(again, hdet.OneCycleHDET)


def test_no_cycle_keeps_it_or_its_optimizer_alive() -> None:
    made = optimizer()
    scheduler = hdet.OneCycleHDET(made, 0.3, total_steps=20)
    made.step()
    scheduler.step(torch.zeros(()))
    gc.disable()
    try:
        watched = weakref.ref(made)
        del scheduler, made
        assert watched() is None
    finally:
        gc.enable()


def test_without_exploration_there_is_no_engine() -> None:
    scheduler = hdet.OneCycleHDET(optimizer(), 0.3, total_steps=20)
    with pytest.raises(StepError, match="give it a spread"):
        scheduler.engine  # noqa: B018
    scheduler.finish()


def test_a_declaration_that_cannot_be_is_refused_even_in_one_process() -> None:
    for options in ({"spread": -0.1}, {"spread": 0.1, "sigma": 0.0}, {"spread": 0.1, "beta": 1.0},
                    {"spread": 0.1, "auto_lr_warmup": -3}, {"spread": 0.1, "window": 0}, {"window": 0}, {"window": 2.5},
                    {"sigma": -1.0}, {"auto_lr_warmup": -3}, {"rate": 0.0}):  # fmt: skip
        with pytest.raises(ConfigError):
            hdet.OneCycleHDET(optimizer(), 0.3, total_steps=20, **options)  # type: ignore[arg-type]
    hdet.OneCycleHDET(optimizer(), 0.3, total_steps=20, auto_lr_warmup=np.int64(3))  # type: ignore[arg-type]
    model = nn.Linear(2, 1)
    made = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ConfigError, match="not both"):
        hdet.OneCycleHDET(made, 0.3, total_steps=20, spread=0.1, model=model, replicas=hdet.replicate(model, made, n=2))
    other = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ConfigError, match="same optimizer"):
        hdet.OneCycleHDET(other, 0.3, total_steps=20, spread=0.1, replicas=hdet.replicate(model, made, n=2))
