"""One line a window, written so that a kill loses the window under way at most, and read back whole."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import resource
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from hdet.errors import HdetError
from hdet.history import IN_MEMORY, History, WindowRecord


def record(window: int, **changes: Any) -> WindowRecord:
    fields: dict[str, Any] = {
        "window": window,
        "start": 5 * window,
        "stop": 5 * window + 5,
        "bases": {"learning_rate": 0.1 * 1.5**window, "größe": 1.0},
        "values": {"learning_rate": [0.1, 0.2], "größe": [1.0, 1.0]},
        "losses": [1.0, None],
        "estimates": {"learning_rate": {"slope": -0.5, "stderr": 0.25, "t": -2.0, "curvature": None}},
        "moves": {"learning_rate": 0.4},
        "merged": True,
        "faults": [{"kind": "non_finite", "replica": 1, "step": 3}],
        "seconds": 1.5,
        "closing": 0.1,
    }
    return WindowRecord(**{**fields, **changes})


def write(path: Path, count: int = 3) -> list[WindowRecord]:
    history = History(path)
    records = [record(window) for window in range(count)]
    for one in records:
        history.append(one)
    return records


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    records = write(tmp_path / "run" / "history.jsonl")
    again = History(tmp_path / "run" / "history.jsonl")
    assert list(again) == records
    assert len(again) == 3
    assert again.bases("learning_rate").tolist() == [
        [5, 0.1],
        [10, pytest.approx(0.15)],
        [15, pytest.approx(0.225)],
    ]


def test_every_line_is_one_strict_json_object(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    odd = {
        "learning_rate": {
            "slope": math.nan,
            "stderr": math.inf,
            "t": -math.inf,
            "averaged": {"slope": math.nan},
        }
    }
    History(path).append(record(0, estimates=odd, bases={"x": 1.0}))
    (line,) = path.read_text().splitlines()

    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    parsed = json.loads(line, parse_constant=refuse)
    assert parsed["estimates"]["learning_rate"] == {
        "slope": None,
        "stderr": None,
        "t": None,
        "averaged": {"slope": None},
    }
    assert History(path).windows[0].losses == [1.0, None]


def test_a_line_is_on_disk_before_append_returns(tmp_path: Path) -> None:
    history = History(tmp_path / "history.jsonl")
    for window in range(3):
        history.append(record(window))
        assert len((tmp_path / "history.jsonl").read_bytes().splitlines()) == window + 1


def test_a_kill_at_any_byte_loses_the_window_under_way_at_most(tmp_path: Path) -> None:
    """And what is appended after it is read back too."""
    whole = tmp_path / "whole.jsonl"
    records = write(whole, 2)
    content = whole.read_bytes()
    first = content.index(b"\n") + 1
    for size in range(first, len(content) + 1, 7):
        path = tmp_path / f"{size}.jsonl"
        path.write_bytes(content[:size])
        history = History(path)
        complete = 2 if size >= len(content) - 1 else 1
        assert list(history) == records[:complete]
        assert path.read_bytes() == content[:size]  # reading alone writes nothing
        history.append(record(complete))
        assert list(History(path)) == [*records[:complete], record(complete)]


def test_a_whole_last_line_without_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    records = write(path, 2)
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    history = History(path)
    assert list(history) == records
    history.append(record(2))
    assert list(History(path)) == [*records, record(2)]


def test_a_torn_first_line_is_an_empty_history(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(b'{"window": 0, "st\xc3')
    history = History(path)
    assert list(history) == []
    history.append(record(0))
    assert list(History(path)) == [record(0)]


def test_garbage_in_the_middle_is_an_error_that_says_where(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    write(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:40], lines[2]]) + "\n")
    with pytest.raises(HdetError, match=r"history.jsonl, line 2 is not a window record"):
        History(path)
    path.write_text("\n".join([lines[0], '{"window": 1, "colour": "red"}', lines[2]]) + "\n")
    with pytest.raises(HdetError, match=r"line 2 is not a window record.*colour"):
        History(path)


def test_truncating_drops_windows_in_memory_and_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    records = write(path, 4)
    history = History(path)
    history.truncate(2)
    assert list(history) == list(History(path)) == records[:2]
    assert os.listdir(tmp_path) == ["history.jsonl"]
    history.append(record(2))
    assert [one.window for one in History(path)] == [0, 1, 2]


@pytest.mark.parametrize("held", [0, 2, 5])
def test_taking_over_another_processs_windows_leaves_them_alone_in_the_file(tmp_path: Path, held: int) -> None:
    theirs = write(tmp_path / "theirs.jsonl", 4)
    path = tmp_path / "folder" / "history.jsonl"
    path.parent.mkdir()
    if held:
        write(path, held)
    history = History(path)
    history.take_over(theirs)
    assert list(history) == list(History(path)) == theirs
    history.append(record(4))
    assert [one.window for one in History(path)] == [0, 1, 2, 3, 4]


def test_a_history_in_memory_alone(tmp_path: Path) -> None:
    history = History()
    history.append(record(0))
    history.truncate(0)
    assert len(history) == 0


def test_an_unknown_knob_is_named_with_those_there_are() -> None:
    history = History()
    history.append(record(0))
    with pytest.raises(HdetError, match=r"no knob 'lr' in this history; there are 'größe', 'learning_rate'"):
        history.bases("lr")


def test_a_window_that_is_there_already_is_not_expected() -> None:
    history = History()
    history.expect(0)
    history.append(record(3))
    history.expect(4)
    with pytest.raises(HdetError, match=r"holds windows up to 3, and window 3 is to be run: .* truncate\(3\)"):
        history.expect(3)


def test_the_loss_of_a_window_is_the_mean_over_sound_replicas() -> None:
    assert record(0, losses=[1.0, None, 2.0]).loss == 1.5
    assert math.isnan(record(0, losses=[None, None]).loss)


def test_records_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        record(0).window = 1  # type: ignore[misc]


def test_an_engine_given_a_history_writes_to_it(problem: Any, train: Any, tmp_path: Path) -> None:
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = History(tmp_path / "history.jsonl")
    engine = hdet.Engine(hdet.replicate(model, optimizer, n=2), [hdet.LearningRate()], window=3, history=history)
    train(engine, 8)
    assert engine.history is history
    assert [one.window for one in History(tmp_path / "history.jsonl")] == [0, 1]
    one = History(tmp_path / "history.jsonl").windows[1]
    assert (one.start, one.stop) == (3, 6)
    assert 0 < one.closing < one.seconds
    assert set(one.estimates["learning_rate"]) >= {"slope", "stderr", "t", "curvature", "curvature_stderr"}


def test_advice_in_an_older_history_is_no_fault(tmp_path: Path) -> None:
    """Hints stood among the faults, and nothing was said of what was learned."""
    path = tmp_path / "history.jsonl"
    older = {name: value for name, value in dataclasses.asdict(record(0)).items() if name not in ("hints", "learned")}
    small = {"kind": "small_probe", "knob": "learning_rate", "step": 5, "factor": 8.0}
    path.write_text(json.dumps({**older, "faults": [*older["faults"], small]}) + "\n")
    [again] = History(path)
    assert again.hints == [small]
    assert again.faults == older["faults"]
    assert again.learned == {}


def test_a_history_of_a_newer_version_is_refused_and_the_field_named(tmp_path: Path) -> None:
    """On its last line too, which is otherwise taken for torn."""
    path = tmp_path / "history.jsonl"
    path.write_text(json.dumps({**dataclasses.asdict(record(0)), "mood": 1}) + "\n")
    with pytest.raises(HdetError, match=r"line 1 .* fields \['mood'\]; .* version of hdet that wrote it"):
        History(path)


# -- a disk that is full, and files that are damaged -----------------------------------------------


@contextmanager
def full_disk(bytes_left: int, path: Path) -> Iterator[None]:
    """Files can grow to a size that `path` nearly has."""
    size = path.stat().st_size if path.exists() else 0
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + bytes_left, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("bytes_left", [0, 100])
def test_a_line_that_a_full_disk_cut_is_written_with_the_next(bytes_left: int, tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    records = write(path, 2)
    history = History(path)
    for window in (2, 3):
        with full_disk(bytes_left, path), pytest.raises(HdetError, match=r"could not be written: .* with the next"):
            history.append(record(window))
    assert list(History(path)) == records  # as a kill now would leave it
    history.append(record(4))
    assert list(History(path)) == list(history) == [*records, record(2), record(3), record(4)]
    assert os.listdir(tmp_path) == ["history.jsonl"]


def test_a_new_run_over_an_old_file_is_refused_before_it_trains(problem: Any, tmp_path: Path) -> None:
    """When the engine is made; at the first pass where a checkpoint might have been loaded in between."""
    path = tmp_path / "history.jsonl"
    write(path, 2)
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replicas = hdet.replicate(model, optimizer, n=2)
    with pytest.raises(HdetError, match=r"windows up to 1: a run that goes on there is given history=hdet\.History"):
        hdet.Engine(replicas, [hdet.LearningRate()], window=3, history=path)
    with pytest.raises(HdetError, match=r"windows up to 1: a run that goes on there is given history=hdet\.History"):
        hdet.attach(model, optimizer, probe=problem.probe(), total_steps=9, history=str(path), quiet=True)
    engine = hdet.Engine(replicas, [hdet.LearningRate()], window=3, history=History(path))
    with pytest.raises(HdetError, match="already holds windows up to 1, and window 0 is to be run"), engine.replicas[0]:
        raise AssertionError("it must not come so far")
    engine.history.truncate(0)
    with engine.replicas[0]:
        pass


def test_training_goes_on_where_the_disk_was_full(problem: Any, train: Any, assert_same: Any, tmp_path: Path) -> None:
    def engine(path: Path) -> hdet.Engine:
        model = problem.model()
        replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=2)
        return hdet.Engine(replicas, [hdet.LearningRate()], window=3, total_steps=12, history=path)

    whole, hit = engine(tmp_path / "whole"), engine(tmp_path / "hit")
    train(whole)
    train(hit, 5)
    with full_disk(50, tmp_path / "hit"), pytest.warns(UserWarning, match="could not be written.* window 1 is kept"):
        train(hit, 7)
    assert hit.step_count == 7
    train(hit)
    assert_same(hit.state_dict(), whole.state_dict())
    kept = [one.bases for one in History(tmp_path / "hit")]
    assert kept == [one.bases for one in whole.history]


def test_a_history_whose_folder_can_be_made_later_is_written_whole(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    history = History(tmp_path / "taken" / "history.jsonl")
    for window in (0, 1):
        with pytest.raises(HdetError, match="could not be written"):
            history.append(record(window))
        assert history.is_behind
    with pytest.raises(HdetError, match="could not be written"):
        history.take_over(history.windows)
    (tmp_path / "taken").unlink()
    history.append(record(2))
    assert not history.is_behind
    assert list(History(tmp_path / "taken" / "history.jsonl")) == [record(0), record(1), record(2)]


def test_dropping_windows_on_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    records = write(path, 3)
    history = History(path)
    with full_disk(-path.stat().st_size + 10, path), pytest.raises(HdetError, match="could not be written"):
        history.truncate(2)
    assert list(history) == list(History(path)) == records


def many_rates(window: int) -> WindowRecord:
    """Twelve rates that are judged alike, of which two were moved further, beside a decay and a knob named "alike"."""
    names = [f"learning_rate[{place}.weight]" for place in range(12)]
    knobs = [*names[:5], "weight_decay", *names[5:], "alike"]
    rates = {name: 2e-3 if name in names[3:5] else 1e-3 for name in knobs}
    judged: dict[str, Any] = {"slope": -0.5, "stderr": 0.25, "t": -2.0, "slopes": [0.1, 0.2]}
    return record(
        window,
        bases=rates,
        values={name: [rate] for name, rate in rates.items()},
        estimates={name: judged | {"step_ratio": 0.5} if name == names[7] else judged for name in names},
        moves={name: 0.25 if rates[name] > 1e-3 else 0.0 for name in knobs},
        learned={name: {"start": 1e-3, "opened": 1e-3, "closed": rate} for name, rate in rates.items()},
        course={name: [rate * (1 + step) for step in range(5)] for name, rate in rates.items()},
        reasons={name: {"rule": "balance"} for name in names[3:5]},
    )


def test_what_many_knobs_have_alike_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history, records = History(path), [many_rates(window) for window in range(2)]
    for one in records:
        history.append(one)
    line = path.read_text().splitlines()[0]
    assert line.count("slopes") == 2
    assert len(line) < 0.5 * len(json.dumps(dataclasses.asdict(records[0])))
    again = History(path).windows
    assert again == records
    assert [list(one.course) for one in again] == [list(one.course) for one in records]
    assert json.loads(record(0).to_json())["moves"] == record(0).moves


@pytest.mark.parametrize(
    "alike",
    [
        '{"moves": [[0, -2]]}',
        '{"moves": [[0, true]]}',
        '{"moves": [[3, 0]]}',
        '{"moves": [[0, 99]]}',
        '{"moves": [[5, "x"]]}',
        '{"moods": [[0, 1]]}',
        '{"moves": [[]]}',
        "[1]",
        "3",
    ],
)
def test_a_line_that_puts_unknown_knobs_together_is_refused(tmp_path: Path, alike: str) -> None:
    path = tmp_path / "history.jsonl"
    told = json.loads(many_rates(0).to_json())
    path.write_text(json.dumps(told | {"alike": json.loads(alike)}) + "\n" + many_rates(1).to_json() + "\n")
    with pytest.raises(HdetError, match="puts together knobs that the line does not have"):
        History(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"window": 1', '"window": null', "window: Input should be a valid integer, got None"),
        ('"stop": 10', '"stop": "10"', "stop: Input should be a valid integer"),
        ('"stop": 10', '"stop": 5', "window 1 from step 5 to 5 cannot be"),
        ('"losses": [1.0, null]', '"losses": ["low", null]', "losses.0: Input should be a valid number, got 'low'"),
        ('"losses": [1.0, null]', '"losses": null', "losses: "),
        ('"moves": {"learning_rate": 0.4}', '"moves": {"learning_rate": null}', "moves.learning_rate: "),
        ('"merged": true', '"merged": 1', "merged: "),
        ('"learned": {', '"learned": {"decay": {"start": 1.0, "closed": 1.0}', "learned.decay lacks opened"),
        ('"seconds": 1.5', '"seconds": Infinity', "Infinity is no JSON"),
        ('"faults": [', '"faults": ["late", ', "faults.0: "),
        ('"slope": -0.5', '"slope": "steep"', "estimates.learning_rate.slope: a finite number or null is expected"),
        pytest.param('"slope": -0.5', f'"slope": {10**400}', "learning_rate.slope: a finite number", id="no float"),
        ('"slope": -0.5', '"freedom": [7]', "estimates.learning_rate.freedom: a finite number or null is expected"),
        ('"slope": -0.5', '"slopes": 3', "estimates.learning_rate.slopes: a list of numbers is expected, got 3"),
        ('"slope": -0.5', '"averaged": {"slope": []}', "estimates.learning_rate.averaged.slope: "),
        ('"tail": {}', '"tail": {"x": 1}', "tail.last: Field required"),
        ('"tail": {}', '"tail": {"last": 0.0, "parts": []}', "tail.parts: "),
        ('"tail": {}', '"tail": {"last": 0, "parts": [{"start": 1, "stop": 2}]}', "tail.parts.0.share: "),
        ('"faults": [', '"faults": [{"kind": "rewound", "step": "3"}, ', "faults: rewound without the step"),
        ('"moves": {"learning', '"moves": {"\\ud800learning', "Invalid JSON"),
        ('{"window"', "[" * 100_000 + '{"window"', ""),
    ],
)
def test_a_line_with_a_field_that_cannot_be_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "history.jsonl"
    write(path)
    lines = path.read_text().splitlines()
    assert old in lines[1]
    path.write_text("\n".join([lines[0], lines[1].replace(old, new), lines[2]]) + "\n")
    with pytest.raises(HdetError, match=f"line 2 is not a window record.*{re.escape(message)}"):
        History(path)


def test_a_damaged_byte_is_no_letter(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    write(path)
    content = path.read_bytes().replace(b"learning_rate", b"learning\xffrate", 1)
    path.write_bytes(content)
    with pytest.raises(HdetError, match=r"line 1 is not a window record: .*decode"):
        History(path)


def test_it_shows_what_it_holds(tmp_path: Path) -> None:
    assert repr(History()) == "<History of 0 windows: no knobs>"
    write(tmp_path / "history.jsonl")
    shown = repr(History(tmp_path / "history.jsonl"))
    assert shown == f"<History of 3 windows to step 15 in {tmp_path / 'history.jsonl'}: learning_rate, größe>"


def test_rows_are_flat_one_for_each_window_and_knob() -> None:
    history = History()
    told = {"learning_rate": {"start": 0.1, "opened": 0.1, "closed": 0.15}}
    averaged = {"slope": 0.5, "stderr": 0.25}
    estimates = {"learning_rate": {"slope": -0.5, "stderr": 0.25, "averaged": averaged}}
    history.append(record(0, learned=told, estimates=estimates))
    first, second = history.rows()
    assert first == {
        "window": 0,
        "start": 0,
        "stop": 5,
        "loss": 1.0,
        "knob": "learning_rate",
        "base": 0.1,
        "learned": 0.15,
        "move": 0.4,
        "judgement": "averaged weights",
        "slope": 0.5,
        "stderr": 0.25,
        "t": 2.0,
    }
    assert (second["knob"], second["learned"], second["judgement"], second["t"]) == ("größe", None, None, None)


# -- memory is bounded ----------------------------------------------------------------------------


def small(window: int) -> WindowRecord:
    return WindowRecord(window, window, window + 1, {"rate": 1.0 + window}, {}, [1.0], {}, {"rate": 0.0}, False)


def test_a_long_history_keeps_its_last_windows_in_memory_and_reads_the_others_back(tmp_path: Path) -> None:
    path, count = tmp_path / "history.jsonl", 3 * IN_MEMORY + 7
    history = History(path)
    for window in range(count):
        history.append(small(window))
        assert len(history.latest) < 2 * IN_MEMORY
    again = History(path)
    assert len(again.latest) < 2 * IN_MEMORY  # nor is it held where it is opened
    assert len(history) == len(again) == count
    assert list(history) == [small(window) for window in range(count)] == again.windows
    assert history.bases("rate")[:, 0].tolist() == list(range(1, count + 1))
    history.require(count, count)
    history.truncate(10)
    history.append(small(10))
    assert list(history) == [small(window) for window in range(11)] == History(path).windows


def test_a_full_disk_loses_nothing_of_a_long_history(tmp_path: Path) -> None:
    path, count = tmp_path / "history.jsonl", 2 * IN_MEMORY + 3
    history = History(path)
    for window in range(count):
        history.append(small(window))
    with full_disk(10, path), pytest.raises(HdetError, match="could not be written"):
        history.append(small(count))
    history.append(small(count + 1))
    assert History(path).windows == [small(window) for window in range(count + 2)]


def test_a_file_replaced_meanwhile_is_noticed_where_it_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history = History(path)
    for window in range(2 * IN_MEMORY):
        history.append(small(window))
    path.write_text(small(0).to_json() + "\n")
    with pytest.raises(HdetError, match=r"no longer holds the \d+ windows before window"):
        list(history)
    assert history.latest[-1] == small(2 * IN_MEMORY - 1)


def test_without_a_file_the_first_windows_are_dropped_and_it_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hdet.history.WITHOUT_FILE", 5)
    history = History()
    for window in range(5):
        history.append(small(window))
    with pytest.warns(UserWarning, match="drops window 0 now; give history='history.jsonl'") as told:
        history.append(small(5))
    for window in range(6, 9):
        history.append(small(window))  # a warning is an error here
    assert told[0].filename == __file__
    assert [record.window for record in history] == [4, 5, 6, 7, 8]


STEPS = 128
BASES = 2**12
MANY = 2 * BASES // STEPS + 3


@pytest.fixture
def few_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many would take seconds to write."""
    monkeypatch.setattr("hdet.history.BASES", BASES)


def long(window: int) -> WindowRecord:
    """A window of many steps, at each of which the base was another."""
    start = STEPS * window
    rates = [1.0 / (1 + step) for step in range(start, start + STEPS)]
    return dataclasses.replace(small(window), start=start, stop=start + STEPS, course={"rate": rates})


def held(history: History) -> int:
    return sum(len(bases) for one in history.latest for bases in one.course.values())


def test_courses_of_long_windows_are_replayed_from_the_file(few_bases: None, tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history = History(path)
    for window in range(MANY):
        history.append(long(window))
        assert held(history) <= BASES
        assert history.latest[-1] == long(window)
    assert len(history) == len(history.latest) == MANY
    assert [one.bases for one in history.latest] == [long(window).bases for window in range(MANY)]
    rates = hdet.schedules.Replay.of(history, "rate").values
    assert rates == tuple(1.0 / (1 + step) for step in range(MANY * STEPS))
    history.truncate(MANY - 1)
    history.append(long(MANY - 1))
    assert hdet.schedules.Replay.of(history, "rate").values == rates
    path.write_text(long(0).to_json() + "\n")
    with pytest.raises(HdetError, match=r"no longer holds the \d+ windows before window"):
        list(history)


def test_without_a_file_courses_are_dropped_and_it_is_said_once(few_bases: None) -> None:
    history = History()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for window in range(MANY):
            history.append(long(window))
            assert held(history) <= BASES
    [once] = said
    assert "the last 4096 bases of its knobs step by step" in str(once.message)
    assert len(history.windows) == MANY
    with pytest.raises(HdetError, match="as a long run without a file does"):
        hdet.schedules.Replay.of(history, "rate")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no /proc here")
def test_a_file_that_the_system_does_not_let_read_is_named() -> None:
    with pytest.raises(HdetError, match=r"^the history /proc/self/mem cannot be read: \[Errno"):
        History("/proc/self/mem")
