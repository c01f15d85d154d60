"""OneCycle against torch's, the others at small numbers, and what all schedules have in common."""

from __future__ import annotations

import math
import sys
import warnings
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hdet.errors import ConfigError
from hdet.hparams.schedule import (
    WSD,
    Constant,
    Cosine,
    FromCallable,
    LinearDecay,
    LinearWarmup,
    OneCycle,
    Replay,
    Schedule,
)

SCHEDULES: list[Schedule] = [
    Constant(0.3),
    OneCycle(3e-4, total_steps=50),
    OneCycle(3e-4, 50, three_phase=True, anneal_strategy="linear", cycle_momentum=True),
    Cosine(1e-3, 50),
    LinearDecay(1e-3, 50, floor=1e-5),
    WSD(1e-3, 50),
    LinearWarmup(Cosine(1e-3, 50, warmup=0.1), 20),
    LinearWarmup(Cosine(1e-3, 50, warmup=0.1), 60),
    Replay((0.1, 0.2, 0.05)),
    FromCallable("math:sqrt", total_steps=9),
]
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.kind)

one_cycles = st.fixed_dictionaries(
    {
        "max_lr": st.floats(1e-8, 1e3),
        "total_steps": st.integers(1, 60),
        "pct_start": st.floats(0, 1),
        "anneal_strategy": st.sampled_from(["cos", "linear"]),
        "div_factor": st.floats(1e-2, 1e4),
        "final_div_factor": st.floats(1e-2, 1e6),
        "three_phase": st.booleans(),
        "base_momentum": st.floats(0, 1),
        "max_momentum": st.floats(0, 1),
    }
)


@given(arguments=one_cycles)
@settings(max_examples=200)
def test_one_cycle_is_torchs_bit_for_bit(arguments: dict[str, Any]) -> None:
    assume(arguments["pct_start"] * arguments["total_steps"] != 1.0)
    schedule = OneCycle(**arguments, cycle_momentum=True)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0, momentum=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "lr_scheduler.step() before optimizer.step()": nothing is trained here
        reference = torch.optim.lr_scheduler.OneCycleLR(optimizer, **arguments)
        for t in range(schedule.total_steps):
            assert schedule(t) == reference.get_last_lr()[0], t
            assert schedule.momentum(t) == optimizer.param_groups[0]["momentum"], t
            if t + 1 < schedule.total_steps:
                reference.step()


def test_one_cycle_refuses_what_torch_divides_by_zero_at() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0, momentum=0.5)
    with pytest.raises(ZeroDivisionError):
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10, pct_start=0.1)
    with pytest.raises(ConfigError, match=r"pct_start \* total_steps is 1.*larger pct_start"):
        OneCycle(1.0, total_steps=10, pct_start=0.1)


def test_one_cycle_without_momentum_has_none() -> None:
    assert OneCycle(1.0, total_steps=10).momentum(3) is None


rising = st.sampled_from([Cosine, LinearDecay, WSD])


@given(
    kind=rising, peak=st.floats(1e-6, 1e3), share=st.floats(0, 1), total=st.integers(1, 80), warmup=st.floats(0, 0.8)
)
def test_warmed_up_schedules_rise_to_the_peak_and_fall_towards_the_floor(
    kind: type[Cosine] | type[LinearDecay] | type[WSD], peak: float, share: float, total: int, warmup: float
) -> None:
    floor = share * peak
    schedule = kind(peak, total, warmup=warmup, floor=floor)
    course = [schedule(t) for t in range(total)]
    rise = round(warmup * total)
    top = max(rise - 1, 0)
    slack = 1e-12 * peak
    if rise or kind is not WSD:
        assert course[top] == pytest.approx(peak, rel=1e-12)
    assert all(a <= b + slack for a, b in pairwise(course[: top + 1]))
    assert all(a >= b - slack for a, b in pairwise(course[top:]))
    assert all(floor - slack <= value <= peak + slack for value in course)
    if floor == 0.0:
        assert min(course) > 0.0


def test_cosine_at_small_numbers() -> None:
    schedule = Cosine(2.0, total_steps=8, warmup=0.5, floor=1.0)
    assert [schedule(t) for t in range(4)] == [1.25, 1.5, 1.75, 2.0]
    expected = [1 + (1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)]
    assert [schedule(t) for t in range(4, 8)] == pytest.approx(expected, rel=1e-15)
    assert Cosine(2.0, total_steps=2, warmup=0.0)(0) == 2.0
    assert Cosine(2.0, total_steps=4, warmup=1.0)(3) == 2.0


def test_linear_at_small_numbers() -> None:
    schedule = LinearDecay(2.0, total_steps=8, warmup=0.5, floor=1.0)
    assert [schedule(t) for t in range(8)] == [1.25, 1.5, 1.75, 2.0, 2.0, 1.75, 1.5, 1.25]


def test_wsd_at_small_numbers() -> None:
    schedule = WSD(4.0, total_steps=10, warmup=0.2, decay=0.4)
    assert [schedule(t) for t in range(10)] == [2.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 3.0, 2.0, 1.0]
    assert [WSD(4.0, total_steps=4, warmup=0.0, decay=0.0)(t) for t in range(4)] == [4.0] * 4


@pytest.mark.parametrize(
    ("schedule", "needed"),
    [
        (Cosine(0.5, 100, warmup=0.0), True),
        (LinearDecay(0.5, 100, warmup=0.2), True),
        (LinearDecay(0.5, 100, warmup=0.3), False),
        (OneCycle(0.5, 100, pct_start=0.3), False),
        (WSD(0.5, 100, warmup=0.1), True),
        (Replay(tuple(0.1 + step / 1000 for step in range(100))), False),
        (Replay((0.1,) * 10 + (0.5,) * 90), True),
        (Replay((0.5,) * 70 + (math.nextafter(0.5, 1.0),) * 30), True),
        (Replay((0.49,) * 70 + (0.5,) * 30), True),
    ],
)
def test_a_warm_up_that_is_too_short_is_held_below_a_line(schedule: Schedule, needed: bool) -> None:
    warmed = LinearWarmup(schedule, 30)
    line = [schedule.nominal_peak() / 30 * (t + 1) for t in range(30)]
    own = [schedule(t) for t in range(100)]
    expected = [min(value, bound) for value, bound in zip(own[:30], line, strict=True)] + own[30:]
    assert [warmed(t) for t in range(100)] == (expected if needed else own)
    assert schedule.with_warmup(30) == (warmed if needed else schedule)
    assert schedule.with_warmup(0) == schedule
    assert warmed.nominal_peak() == schedule.nominal_peak()
    assert warmed.foreknown is schedule.foreknown


def test_a_warm_up_of_a_schedule_without_an_end_leads_to_its_first_peak() -> None:
    warmed = LinearWarmup(Constant(0.1), 4)
    assert [warmed(t) for t in range(6)] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])
    with pytest.raises(ConfigError, match="step 0; asked for step -1"):
        warmed(-1)


def test_a_warm_up_reaches_the_peak_of_a_long_schedule_that_is_sampled() -> None:
    """Of 100,000 steps every fiftieth is sampled; the peak lies between two of them."""
    values = [0.1] * 100_000
    values[149] = 0.5
    assert LinearWarmup(Replay(tuple(values)), 300)(149) == pytest.approx(0.25)


def test_replay_gives_what_was_recorded() -> None:
    schedule = Replay((0.1, 0.2, 0.05))
    assert [schedule(t) for t in range(4)] == [0.1, 0.2, 0.05, 0.05]
    assert schedule.total_steps == 3


def test_from_callable_asks_the_function_and_no_farther_than_the_end() -> None:
    schedule = FromCallable("math:sqrt", total_steps=5)
    assert [schedule(t) for t in (0, 1, 4, 100)] == [0.0, 1.0, 2.0, 2.0]
    assert FromCallable("math:sqrt").total_steps is None
    assert FromCallable("math:sqrt")(100) == 10.0


@pytest.mark.parametrize("path", ["numpy:float32", "numpy:int64", "numpy:asarray", "torch:tensor"])
def test_from_callable_takes_numbers_of_numpy_and_torch(path: str) -> None:
    assert FromCallable(path)(3) == 3.0
    assert type(FromCallable(path)(3)) is float


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:f", "no_such_module"),
        ("math:no_such_function", "no_such_function"),
        ("math:pi", "cannot be called"),
        ("builtins:bin", "must return a finite number; it gave '0b11' at step 3"),
        ("builtins:print", "must return a finite number; it gave None"),
        ("builtins:bool", "must return a finite number; it gave True"),
        ("numpy:bool_", "must return a finite number; it gave True"),
    ],
)
def test_from_callable_names_what_is_wrong(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FromCallable(path)(3)


@pytest.mark.parametrize("path", ["math", "math:", ":sqrt", "math:sqrt()", "a b:c", "math.:sqrt"])
def test_from_callable_takes_module_and_function(path: str) -> None:
    with pytest.raises(ConfigError, match="path"):
        FromCallable(path)


@each_schedule
def test_past_the_end_the_last_value_is_held(schedule: Schedule) -> None:
    total = schedule.total_steps
    if total is not None:
        assert schedule(total) == schedule(total + 1000) == schedule(total - 1)
        assert schedule(total - 1) != schedule(total - 2)


@each_schedule
def test_a_schedule_survives_writing_down(schedule: Schedule) -> None:
    again = Schedule.from_dict(schedule.to_dict())
    assert again == schedule
    assert [again(t) for t in range(8)] == [schedule(t) for t in range(8)]


@each_schedule
def test_steps_before_the_first_are_refused(schedule: Schedule) -> None:
    if not isinstance(schedule, Constant):
        with pytest.raises(ConfigError, match="step 0; asked for step -1"):
            schedule(-1)


@each_schedule
def test_a_call_is_cheap(schedule: Schedule) -> None:
    """It calls few functions: it looks at a step, not at a course, which is looked at once."""
    called: list[str] = []

    def notice(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            called.append(frame.f_code.co_qualname)

    schedule(7)
    sys.setprofile(notice)
    try:
        schedule(7)
    finally:
        sys.setprofile(None)
    assert len(called) <= 12


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (OneCycle, {"max_lr": 1.0, "total_steps": 10, "pct_start": 1.5}, "pct_start"),
        (OneCycle, {"max_lr": 1.0, "total_steps": 0}, "total_steps"),
        (OneCycle, {"max_lr": 1.0, "total_steps": 10, "anneal_strategy": "sine"}, "anneal_strategy"),
        (Cosine, {"peak": 1.0, "total_steps": 10, "floor": 2.0}, "floor must not exceed peak"),
        (LinearDecay, {"peak": 1.0, "total_steps": 10, "warmup": -0.1}, "warmup"),
        (WSD, {"peak": 1.0, "total_steps": 10, "warmup": 0.6, "decay": 0.6}, r"warmup \+ decay must not exceed 1"),
        (Replay, {"values": ()}, "values"),
        (Replay, {"values": (1.0, math.nan)}, "values"),
        (Constant, {"value": math.inf}, "value"),
        (LinearWarmup, {"schedule": Constant(0.1), "steps": -1}, "steps"),
    ],
)
def test_errors_name_the_field(kind: type[Schedule], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**fields)
