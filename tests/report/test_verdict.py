"""How sure a run is of each knob, from its history."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.history import WindowRecord
from hdet.report.verdict import Verdict, t_statistic, verdicts


def record(window: int, slope: Any, stderr: Any, move: float = 0.0) -> WindowRecord:
    return WindowRecord(
        window=window,
        start=10 * window,
        stop=10 * window + 10,
        bases={"rate": 1.0},
        values={"rate": [0.9, 1.1]},
        losses=[1.0, 2.0],
        estimates={"rate": {"slope": slope, "stderr": stderr}},
        moves={"rate": move},
        merged=True,
    )


@pytest.mark.parametrize(
    ("slope", "stderr", "t"),
    [
        (-0.4, 0.1, -4.0),
        (0.0, 0.1, 0.0),
        (0.3, 0.0, math.inf),
        (0.0, 0.0, 0.0),
        (None, 0.1, None),
        (0.3, None, None),
        (0.0, math.inf, None),
        (math.nan, 0.1, None),
    ],
)
def test_the_t_of_one_window(slope: Any, stderr: Any, t: float | None) -> None:
    found = t_statistic(record(0, slope, stderr), "rate")
    assert found == t if t is None else found == pytest.approx(t)


def test_a_knob_a_window_does_not_know_has_no_t() -> None:
    assert t_statistic(record(0, 1.0, 1.0), "other") is None


def test_evidence_adds_up_over_windows_and_the_last_quarter_stands_alone() -> None:
    history = [record(w, slope, 1.0, 0.1) for w, slope in enumerate([-4.0] * 12 + [1.0, -1.0, 3.0, 1.0])]
    (verdict,) = verdicts(history, {"rate": (1.0, 5.0)})
    assert verdict.overall == pytest.approx((-48 + 4) / math.sqrt(16))
    assert verdict.late == pytest.approx(4 / math.sqrt(4))
    assert verdict.moves == pytest.approx(1.6)
    assert (verdict.start, verdict.end) == (1.0, 5.0)


def test_windows_that_taught_nothing_do_not_count_and_none_rules_alone() -> None:
    history = [record(0, 1e9, 1e-9), record(1, None, None), record(2, 0.0, math.inf), record(3, None, None)]
    (verdict,) = verdicts(history, {"rate": (1.0, 1.0)})
    assert verdict.overall == 10.0
    assert verdict.late == 0.0, "a knob without evidence at the end is not being pulled"


def test_a_run_without_windows_has_a_verdict_all_the_same() -> None:
    (verdict,) = verdicts([], {"rate": (1.0, 1.0)})
    assert (verdict.overall, verdict.late, verdict.words) == (0.0, 0.0, "no clear sign (t = +0.0)")


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60))
def test_mirrored_evidence_gives_the_mirrored_verdict(slopes: list[float]) -> None:
    (up,) = verdicts([record(w, s, 1.0) for w, s in enumerate(slopes)], {"rate": (1.0, 1.0)})
    (down,) = verdicts([record(w, -s, 1.0) for w, s in enumerate(slopes)], {"rate": (1.0, 1.0)})
    assert (up.overall, up.late) == (-down.overall, -down.late)
    assert abs(up.overall) <= 10.0 * math.sqrt(len(slopes)) + 1e-9


@pytest.mark.parametrize(
    ("overall", "late", "words"),
    [
        (1.9, 5.0, "no clear sign (t = +1.9)"),
        (-6.0, 0.5, "up was better (t = -6.0), settled"),
        (6.0, 0.5, "down was better (t = +6.0), settled"),
        (-6.0, -3.0, "up was better (t = -6.0), still pulled up (t = -3.0)"),
        (-6.0, 3.0, "up was better (t = -6.0), still pulled down (t = +3.0)"),
    ],
)
def test_in_words(overall: float, late: float, words: str) -> None:
    assert Verdict("rate", 1.0, 2.0, moves=0.7, overall=overall, late=late).words == words
