"""A schedule whose fall is bent goes on from where it is, and ends as the given one to a power."""

from __future__ import annotations

import math

import pytest

from hdet.hparams.bend import Bend
from hdet.schedules import Constant, Cosine, LinearDecay

LINE = LinearDecay(0.5, total_steps=100, warmup=0.3)


def test_as_given_a_schedule_keeps_every_bit() -> None:
    assert [Bend().of(LINE, step) for step in range(120)] == [LINE(step) for step in range(120)]
    again = Bend().to(1.0, LINE, 50)
    assert [again.of(LINE, step) for step in range(120)] == [LINE(step) for step in range(120)]


@pytest.mark.parametrize("power", [0.5, 0.75, 1.5])
def test_from_the_peak_on_the_fall_is_the_given_one_to_a_power(power: float) -> None:
    bend = Bend().to(power, LINE, 30)
    for step in (30, 31, 60, 99):
        assert bend.of(LINE, step) == pytest.approx(0.5 * (LINE(step) / 0.5) ** power)


def test_another_power_on_the_way_makes_no_jump() -> None:
    schedule = Cosine(0.5, total_steps=100, warmup=0.1)
    first = Bend().to(0.75, schedule, 20)
    second = first.to(1.5, schedule, 60)
    assert second.of(schedule, 60) == pytest.approx(first.of(schedule, 60), rel=1e-12)
    ratio = second.of(schedule, 80) / second.of(schedule, 60)
    assert ratio == pytest.approx((schedule(80) / schedule(60)) ** 1.5)


def test_a_schedule_at_zero_stays_there() -> None:
    assert Bend().to(0.5, Constant(0.0), 3).of(Constant(0.0), 4) == 0.0
    ending = Bend(since=0, power=0.5, offset=1.0)
    assert ending.to(0.75, Constant(0.0), 3) == Bend(3, 0.75, 1.0)
    assert math.isfinite(ending.of(Constant(0.0), 3))
