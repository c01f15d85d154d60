"""What moved a knob, on what evidence, and what is still asked for: from its history."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from hdet.history import History
from hdet.record import WindowRecord
from hdet.report import Verdict, importances, interactions, verdicts
from hdet.report.advice import advised
from hdet.report.reading import readings


def record(
    window: int, slope: Any = None, move: float = 0.0, losses: list[float | None] | None = None, **changes: Any
) -> WindowRecord:
    estimate = {"slope": slope, "stderr": None if slope is None else 1.0, **changes.pop("estimate", {})}
    return WindowRecord(
        window=window,
        start=10 * window,
        stop=10 * window + 10,
        bases={"rate": changes.pop("base", 1.0)},
        values={"rate": [0.9, 1.1]},
        losses=[1.0 / (1 + window), 2.0 / (1 + window)] if losses is None else losses,
        estimates={"rate": estimate},
        moves={"rate": move},
        merged=True,
        learned={"rate": {"start": 1.0, "opened": 1.0, "closed": math.exp(move)}},
        **changes,
    )


def averaged(slope: float | None) -> dict[str, Any]:
    return {"averaged": {"slope": slope, "stderr": None if slope is None else 1.0}}


def verdict(*history: WindowRecord) -> Verdict:
    [found] = verdicts(history)
    return found


@pytest.mark.parametrize(
    ("slope", "stderr", "t"), [(-0.4, 0.1, -4.0), (0.0, 0.1, 0.0), (0.3, 0.0, math.inf), (0.0, 0.0, 0.0)]
)
def test_the_t_of_one_window(slope: float, stderr: float, t: float) -> None:
    [found] = readings(record(0, estimate={"slope": slope, "stderr": stderr}), "rate")
    assert found.t == pytest.approx(t)


@pytest.mark.parametrize(
    ("slope", "stderr"), [(None, 0.1), (0.3, None), (0.0, math.inf), (math.nan, 0.1), ("1", 0.1), (True, 0.1)]
)
def test_a_window_that_taught_nothing_has_no_reading(slope: Any, stderr: Any) -> None:
    assert readings(record(0, estimate={"slope": slope, "stderr": stderr}), "rate") == []
    assert readings(record(0), "other") == []


def test_averaged_weights_decide_where_they_were_read() -> None:
    told = readings(record(0, 5.0, estimate=averaged(-1.0)), "rate")
    assert [(one.source, one.t) for one in told] == [("averaged weights", -1.0), ("last weights", 5.0)]
    told = readings(record(0, 5.0, estimate=averaged(None)), "rate")
    assert [(one.source, one.t) for one in told] == [("last weights", 5.0)]


def test_looking_ahead_is_told_from_levels_on_one_side() -> None:
    """Both have an offset; only a schedule below its peak is looked ahead of."""
    below = record(0, 5.0, base=0.1, estimate={"offset": 0.5})
    assert [one.source for one in readings(below, "rate")] == ["looking ahead"]
    at_peak = record(0, 5.0, base=1.0, estimate={"offset": 0.5})
    assert [one.source for one in readings(at_peak, "rate")] == ["its evidence"]


def test_a_rate_that_the_last_weights_raised_and_averaged_ones_left_alone() -> None:
    """The sum over both judgements would show no clear sign: they mean different things."""
    told = verdict(
        *(record(w, -8.0, 0.5, estimate=averaged(None)) for w in range(4)),
        *(record(w, 6.0, estimate=averaged(-0.5)) for w in range(4, 10)),
        record(10, None, estimate=averaged(None)),
    )
    assert told.trust == "clear"
    assert told.moved == "up in 4 windows, steps 10 to 40, by last weights (|t| up to 8.0)"
    assert told.outlook == "nothing clear is asked for (mean t = -0.5 in 6 windows); not measured after step 100"


def test_a_knob_that_one_weak_window_moved_far_is_not_called_sure() -> None:
    """Nor does clear evidence from before the moves speak for them."""
    told = verdict(*(record(w, 20.0) for w in range(6)), record(6, 3.9, -0.2), record(7, -1.7, 1.3), record(8))
    assert told.support == pytest.approx(0.2 / 1.5)
    assert told.trust == "weak"
    assert told.moved == (
        "up in 1 window, step 80, by its evidence (|t| 1.7); down in 1 window, step 70, by its evidence (|t| 3.9)"
    )
    assert told.outlook == "not measured since it last moved"


def test_what_pulls_at_a_knob_that_holds_is_told() -> None:
    assert verdict(*(record(w, 5.0) for w in range(4))).outlook == (
        "less is still asked for (mean t = +5.0 in 4 windows)"
    )
    assert verdict(*(record(w, -5.0) for w in range(4)), record(4)).outlook == (
        "more is still asked for (mean t = -5.0 in 4 windows); not measured after step 40"
    )
    assert verdict(record(0), record(1)).outlook == "never measured"


def test_a_move_without_evidence_of_its_own_rests_on_earlier_windows() -> None:
    told = verdict(record(0, -5.0), record(1, 0.3, 0.4))
    assert told.moved == "up in 1 window, step 20, by earlier windows"
    assert told.trust == "weak"


def test_a_group_that_took_its_place_among_others_did_so_by_its_steps() -> None:
    """Though what all groups have in common called for more."""
    told = verdict(record(0, -5.0, -1.2, reasons={"rate": {"rule": "balance"}}))
    assert told.moved == "down in 1 window, step 10, by steps beside the weights"
    assert told.trust == "clear"


def test_a_move_that_the_guard_made_counts_neither_for_nor_against() -> None:
    """A bad batch made the guard lower a rate, which evidence then raised again."""
    back = [{"kind": "non_finite", "replica": 0, "step": 5}, {"kind": "restored", "step": 10}]
    told = verdict(
        record(0, -5.0, 1.0), record(1, -5.0, -1.1, faults=back), record(2, -5.0, 1.0), record(3, 0.1), record(4, 0.1)
    )
    assert (told.down, told.support, told.trust) == (None, 1.0, "clear")
    assert told.moved == (
        "up in 2 windows, steps 10 to 30, by its evidence (|t| up to 5.0); the guard lowered it at step 20, after "
        "every replica had become non-finite (restored)"
    )
    assert advised(told)[0] == told.end


def test_a_turn_of_a_newer_version_is_told_by_its_name() -> None:
    told = verdict(record(0), record(1, -0.1, -1.1, reasons={"rate": {"guard": "rolled_over"}}))
    assert told.moved == "the guard lowered it at step 20, after rolled_over"


def test_a_rate_that_was_entered_low_and_only_raised_is_not_advised_low() -> None:
    """Its moves are clear, and they led up; it ends below what was set since it was entered there."""
    entered = {"rate": {"start": 1.0, "opened": 0.25, "closed": 0.41}}
    told = verdict(replace(record(0, -5.0, 0.5), learned=entered))
    assert (told.trust, told.start, told.end) == ("clear", 1.0, 0.41)
    assert advised(told) == (1.0, "as it was set; it was entered further down, and went up from there")
    lowered = replace(record(0, 5.0, -0.5), learned={"rate": {"start": 1.0, "opened": 0.25, "closed": 0.15}})
    assert advised(verdict(lowered))[0] == 0.15


def test_where_the_guard_alone_moved_a_knob_its_value_is_not_recommended() -> None:
    told = verdict(record(0), record(1, -0.1, -1.1, faults=[{"kind": "rewound", "step": 10}]))
    assert (told.up, told.down, told.trust) == (None, None, "by the guard")
    assert told.outlook == "not measured since it last moved"
    assert advised(told) == (
        1.0,
        "as it was set; the guard lowered it at step 20, after training had gone wrong (rewound)",
    )
    assert TypeAdapter(Verdict).validate_python(json.loads(json.dumps(told.to_dict()))) == told


def test_a_move_is_its_evidences_where_the_guard_moved_another_knob_alone() -> None:
    back = [{"kind": "rewound", "step": 10}]
    reasons = {"rate": {"rule": "raise"}, "decay": {"guard": "rewound"}}
    told = verdict(record(0, -5.0, 0.5, faults=back, reasons=reasons))
    assert told.moved == "up in 1 window, step 10, by its evidence (|t| 5.0)"


def test_moves_that_cancel_are_called_to_and_fro() -> None:
    told = verdict(*(record(w, (-1.0) ** w * 5, (-1.0) ** (w + 1) * 0.3) for w in range(6)))
    assert told.trust == "to and fro"


@pytest.mark.parametrize(
    ("trained", "held_out", "progress"),
    [
        ([2.3, 2.2, 2.0, 1.5, 1.2, 1.1, 1.0, 0.9], None, True),
        ([2.3, 2.5, 2.4, 2.3, 2.3, 2.3, 2.3, 2.3], None, False),
        (
            [2.3, 2.5, 2.4, 2.3, 2.3, 2.3, 2.3, 2.3],
            [2.2, 2.0, 1.9, 1.9, 1.8, 1.8, 1.7, 1.7],
            True,
        ),  # dropout rises, say
        ([2.3, 2.5, 2.4, 2.3, 2.3, 2.3, 2.3, 2.3], [2.2, 2.3, 2.3, 2.3, 2.3, 2.3, 2.3, 2.3], False),
        ([2.33, 2.5, 2.4, 2.35, 2.33, 2.32, 2.31, 2.3], [435.0, 9.3, 2.5, 2.4, 2.4, 2.3, 2.3, 2.3], False),
        ([20.5, 2.4, 2.36, 2.35, 2.33, 2.32, 2.31, 2.3], [435.0, 2.35, 2.34, 2.4, 2.4, 2.3, 2.3, 2.3], False),
        ([20.5, 2.4, 2.36, 2.0, 1.7, 1.5, 1.3, 1.2], [435.0, 9.3, 2.5, 2.4, 2.4, 2.3, 2.3, 2.3], True),
        ([0.4 * 0.7**w for w in range(10)], [0.9 + 0.005 * w for w in range(10)], True),  # overfitted
        ([2.0, 1.2, 1.05, 1.0, 0.99, 0.985, 0.98, 0.98], [6.0, 3.6, 3.15, 3.0, 2.97, 2.95, 2.94, 2.94], True),
        ([-1.0, -1.2, -1.4, -1.8], None, True),
        ([math.nan, -1.0, -0.9, -0.8, -0.7], None, False),
        ([2.3, 2.3, 2.3], None, True),  # too few to tell
    ],
)
def test_a_run_that_learned_nothing_teaches_nothing(
    trained: list[float], held_out: list[float] | None, progress: bool
) -> None:
    """However clear its evidence is."""
    levels = [{"level": level} for level in held_out] if held_out else [{} for _ in trained]
    told = verdict(
        *(
            record(w, 5.0, -0.5, losses=[loss if math.isfinite(loss) else None], estimate=level)
            for w, (loss, level) in enumerate(zip(trained, levels, strict=True))
        )
    )
    assert told.progress is progress
    assert told.trust == ("clear" if progress else "no progress")
    value, why = advised(told)
    assert (value, why[:7]) == ((told.end, "learned") if progress else (told.start, "as it w"))


@pytest.mark.parametrize(
    ("first", "trained", "progress"),
    [
        (2.3, [116.0, 9.0, 2.4, 2.33, 2.32, 2.32, 2.32, 2.31], False),  # the first window is no place to begin from
        (2.3, [116.0, 9.0, 2.4, 2.1, 1.8, 1.6, 1.5, 1.4], True),
        (2.0, [1.99, 1.98, 1.97, 1.97, 1.96, 1.96, 1.95, 1.95], True),  # as in fine-tuning
        (0.2, [0.54, 0.45, 0.36, 0.32], True),  # one batch of few examples, which was easy
        (1e-4, [1.0, 0.8, 0.7, 0.6], True),  # a loss that is phased in
        (0.0, [116.0, 9.0, 2.4, 2.3], True),
        (-1.0, [-0.7, -0.9, -1.0, -1.0], True),
        (None, [116.0, 9.0, 2.4, 2.33, 2.32, 2.32, 2.32, 2.31], True),  # an older history does not tell
    ],
)
def test_where_the_first_steps_wrecked_a_model_the_first_loss_tells_where_it_began(
    first: float | None, trained: list[float], progress: bool
) -> None:
    told = [record(w, 5.0, -0.5, losses=[loss], first_loss=None if w else first) for w, loss in enumerate(trained)]
    assert verdict(*told).progress is progress


@pytest.mark.parametrize(("held_out", "progress"), [(2.1, True), (2.3, False)])
def test_held_out_loss_may_tell_of_progress_after_a_wrecked_beginning(held_out: float, progress: bool) -> None:
    losses = [116.0, 9.0, 2.4, 2.33]
    told = [
        record(w, losses=[loss], first_loss=None if w else 2.3, estimate={"level": held_out})
        for w, loss in enumerate(losses)
    ]
    assert verdict(*told).progress is progress


@pytest.mark.parametrize(("windows", "trust"), [(1, "clear"), (12, "weak")])
@pytest.mark.parametrize("sub_batches", [0, 8])
def test_of_many_windows_one_is_surprising_by_chance(windows: int, trust: str, sub_batches: int) -> None:
    """So what one of few proves, one of many does not."""
    slopes = {"slopes": [2.8] * sub_batches}
    moved = record(windows - 1, 2.8, -0.5, estimate=slopes)
    told = verdict(*(record(w, 0.1, estimate=slopes) for w in range(windows - 1)), moved)
    assert told.trust == trust


@pytest.mark.parametrize(
    ("estimate", "support"),
    [
        ({}, 1.0),
        ({"slopes": [2.8] * 8}, 1.0),
        ({"slopes": [2.8] * 4}, 0.0),
        ({"slopes": [2.8] * 2}, 0.0),
        ({"freedom": 7.0}, 1.0),
        ({"freedom": 3.0}, 0.0),
    ],
)
def test_an_error_of_few_numbers_proves_less(estimate: dict[str, Any], support: float) -> None:
    assert verdict(record(0, 2.8, -0.5, estimate=estimate)).support == support


def test_each_judgement_of_a_window_counts() -> None:
    """Of two there is one to choose from; and the error is that of the one that was chosen."""
    both = {"averaged": {"slope": 2.1, "stderr": 1.0, "slopes": []}, "slopes": []}
    assert verdict(record(0, 0.1, -0.5, estimate=both)).support == 0.0
    both["averaged"]["slope"] = 2.8
    assert verdict(record(0, 0.1, -0.5, estimate=both)).support == 1.0
    both["averaged"]["slopes"] = [2.8] * 3
    assert verdict(record(0, 0.1, -0.5, estimate=both)).support == 0.0


def test_start_and_end_are_what_the_history_recorded() -> None:
    told = verdict(record(0, -5.0, 0.5), record(1, -5.0, 0.25))
    assert (told.start, told.end) == (1.0, math.exp(0.25))
    assert told.factor == math.exp(0.25)
    older = [WindowRecord(**{**vars(one), "learned": {}}) for one in (record(0, -5.0, 0.5), record(1, -5.0, 0.25))]
    assert (verdict(*older).start, verdict(*older).factor) == (None, None)


def test_a_verdict_is_kept_as_plain_json_and_read_back() -> None:
    told = verdict(record(0, -5.0, 0.5), record(1, 1e9, -0.25), record(2))
    kept = json.loads(json.dumps(told.to_dict(), allow_nan=False))
    assert kept["moved"] == told.moved
    assert TypeAdapter(Verdict).validate_python(kept) == told


def test_a_history_without_windows_has_no_verdicts() -> None:
    assert verdicts([]) == []


steps = st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-2, 2)), min_size=1, max_size=40)


@given(steps)
def test_mirrored_evidence_and_moves_give_the_mirrored_verdict(run: list[tuple[float, float]]) -> None:
    one = verdict(*(record(w, slope, move) for w, (slope, move) in enumerate(run)))
    other = verdict(*(record(w, -slope, -move) for w, (slope, move) in enumerate(run)))
    assert (one.up, one.down, one.asked) == (other.down, other.up, -other.asked)
    assert (one.support, one.trust) == (other.support, other.trust)
    assert abs(one.asked) <= 10.0
    assert 0.0 <= one.support <= 1.0 + 1e-12


@pytest.mark.parametrize(
    ("powers", "told"),
    [
        ([{}, {}], "nothing"),
        ([{}, {"rate": 0.75}], "falls slower than given (power 0.75)"),
        ([{"rate": 0.75}, {"rate": 1.5}], "falls faster than given (power 1.50)"),
        ([{"rate": 0.75}, {}], "nothing"),
    ],
    ids=["as given", "slower", "faster in the end", "as given in the end"],
)
def test_how_its_schedule_falls_is_told_with_what_moved_it(powers: list[dict[str, float]], told: str) -> None:
    assert verdict(*(record(number, powers=power) for number, power in enumerate(powers))).moved == told


def test_a_fall_is_told_after_moves() -> None:
    found = verdict(record(0, move=0.1), record(1, powers={"rate": 0.75}))
    assert found.moved.endswith("; falls slower than given (power 0.75)")
    assert found.moved.startswith("up in 1 window")


def test_a_history_is_judged_as_its_windows_are() -> None:
    history = History()
    for number in range(6):
        history.append(record(number, slope=-1.0, move=0.1))
    assert verdicts(history) == verdicts(history.windows)
    assert importances(history) == importances(history.windows) != []
    assert interactions(history) == interactions(history.windows)
