"""What a run has learned of a knob, apart from its schedule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hdet
from hdet.hparams.learned import Learned, Shifts
from hdet.schedules import Cosine
from hdet.spreads import TwoLevel


def test_a_start_of_zero_has_no_factor() -> None:
    learned = Learned(start=0.0, value=0.1)
    assert learned.factor is None
    assert str(learned) == "0 -> 0.1"
    assert repr(learned) == "Learned(start=0, value=0.1, factor=None)"


def test_it_is_read_to_four_digits_and_kept_whole() -> None:
    learned = Learned(start=1e-3, value=0.0082153729)
    assert repr(learned) == "Learned(start=0.001, value=0.008215, factor=8.215)"
    assert learned.value == 0.0082153729


def test_a_beta_is_never_read_as_1() -> None:
    assert repr(Learned(start=0.999, value=0.99997)) == "Learned(start=0.999, value=0.99997, factor=1.001)"
    assert str(Learned(start=0.95, value=0.9999961)) == "0.95 -> 0.9999961 (x 1.05)"


def engine(initial_shift: float = 0.0, high: float = 10.0) -> hdet.Engine:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    knob = hdet.LearningRate(
        schedule=Cosine(0.1, 20), initial_shift=initial_shift, bounds=(0.0, high), spread=TwoLevel(0.0)
    )
    return hdet.Engine(hdet.replicate(model, optimizer, n=2), [knob], window=5)


def test_the_schedule_does_not_enter_into_it() -> None:
    """At the end of the run the base has decayed, and what was learned has not."""
    made = engine(initial_shift=0.5)
    for _ in range(20):
        made.optimizers[0].step()
        made.step()
    assert made.bases["learning_rate"] < 0.1 / 10
    learned = made.learned["learning_rate"]
    assert learned.start == 0.1
    assert learned.value == pytest.approx(0.1 * 2.718281828459045**0.5)
    assert learned.factor == pytest.approx(2.718281828459045**0.5)


def test_it_stays_within_the_bounds() -> None:
    assert engine(initial_shift=3.0, high=0.5).learned["learning_rate"].value == 0.5


def test_every_window_records_it_before_and_after_its_moves() -> None:
    made = engine()
    [knob] = made.knobs
    for step in range(20):
        made.optimizers[0].step()
        if step == 7:
            knob.shift = 1.0  # as a controller moves it
        made.step()
    told = [record.learned["learning_rate"] for record in made.history]
    assert [one["start"] for one in told] == [0.1] * 4
    assert [one["closed"] for one in told[:-1]] == [one["opened"] for one in [told[0], *told[2:]]]
    assert told[-1]["closed"] == pytest.approx(0.1 * 2.718281828459045)


def test_knobs_of_one_kind_that_learned_the_same_share_a_line() -> None:
    up, down = Learned(start=1e-3, value=8e-3), Learned(start=1e-3, value=2e-3)
    shifts = Shifts({"learning_rate[a]": up, "learning_rate[b]": down, "learning_rate[c]": up, "dropout": up})
    assert str(shifts).splitlines() == [
        "learning_rate[a] and 1 more  0.001 -> 0.008 (x 8)",
        "learning_rate[b]             0.001 -> 0.002 (x 2)",
        "dropout                      0.001 -> 0.008 (x 8)",
    ]
    assert shifts["learning_rate[c]"] is up
    assert shifts.get("learning_rate") is shifts["learning_rate"] is up
    assert shifts.get("weight_decay") is None
    assert str(Shifts()) == ""


def test_the_table_says_where_fewer_steps_were_made_than_the_run_has() -> None:
    """As where a loop's batches were counted for steps, or the run was ended before."""
    made = engine()
    for step in range(20):
        told = f"(in {step} of 20 steps)"
        unstepped = ": the optimizer was not stepped, so nothing is learned; a lower rate is caution)"
        assert str(made.learned).splitlines()[1:] == [told if step else told[:-1] + unstepped]
        made.optimizers[0].step()
        made.step()
    assert made.finished
    assert len(str(made.learned).splitlines()) == 1
