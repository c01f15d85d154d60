"""A schedule whose fall is bent goes on from where it is, and ends as the given one to a power."""

from __future__ import annotations

import pytest

from hdet.hparams.bend import Bend
from hdet.schedules import Cosine, LinearDecay

LINE = LinearDecay(0.5, total_steps=100, warmup=0.3)


def test_as_given_a_schedule_keeps_every_bit() -> None:
    given = [LINE(step) for step in range(120)]
    assert [Bend().of(value) for value in given] == given
    assert [Bend().to(1.0, LINE(50)).of(value) for value in given] == given


@pytest.mark.parametrize("power", [0.5, 0.75, 1.5])
def test_from_the_peak_on_the_fall_is_the_given_one_to_a_power(power: float) -> None:
    bend = Bend().to(power, LINE(30))
    for step in (30, 31, 60, 99):
        assert bend.of(LINE(step)) == pytest.approx(0.5 * (LINE(step) / 0.5) ** power)


def test_another_power_on_the_way_makes_no_jump() -> None:
    schedule = Cosine(0.5, total_steps=100, warmup=0.1)
    first = Bend().to(0.75, schedule(20))
    second = first.to(1.5, schedule(60))
    assert second.of(schedule(60)) == pytest.approx(first.of(schedule(60)), rel=1e-12)
    ratio = second.of(schedule(80)) / second.of(schedule(60))
    assert ratio == pytest.approx((schedule(80) / schedule(60)) ** 1.5)


def test_back_at_a_power_of_1_it_stays_apart_from_the_schedule() -> None:
    back = Bend().to(0.5, 0.4).to(1.0, 0.1)
    assert back.of(0.05) == pytest.approx(0.1)


def test_a_schedule_at_zero_stays_there() -> None:
    bend = Bend(0.5, 1.0)
    assert bend.of(0.0) == 0.0
    assert bend.to(0.75, 0.0) == bend
