"""Records of windows with several knobs of a kind: the kind's name gives the one in the middle."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from hdet.history import History, WindowRecord


def of_three(**told: Any) -> WindowRecord:
    bases = {f"learning_rate[{name}]": base for name, base in zip("abc", (0.1, 0.3, 0.2), strict=True)}
    made: dict[str, Any] = {"bases": {**bases, "dropout": 0.5}, "values": {}, "estimates": {}, "moves": {}}
    return WindowRecord(window=0, start=0, stop=2, losses=[1.0], merged=False, **{**made, **told})


def test_of_several_knobs_the_kind_alone_is_the_one_in_the_middle() -> None:
    moves = {"learning_rate[b]": 1.0, "learning_rate[c]": 2.0, "learning_rate[a]": 3.0}
    reasons = {"learning_rate[a]": {"rule": "raise"}}
    record = of_three(moves=moves, reasons=reasons)
    for same in (record, pickle.loads(pickle.dumps(record)), WindowRecord.from_json(record.to_json())):
        assert same.bases["learning_rate"] == same.bases.get("learning_rate") == 0.2
        assert same.moves["learning_rate"] == 2.0
        assert same.reasons.get("learning_rate") is None, "nothing is told of the middle one"
        assert same.bases.get("momentum") is same.bases.get(None) is None
        assert "learning_rate" not in same.bases
        with pytest.raises(KeyError, match="learning_rate"):
            same.reasons["learning_rate"]
    history = History()
    history.append(record)
    assert history.bases("learning_rate").tolist() == [[2.0, 0.2]]


def test_a_record_as_a_dict_knows_the_middle_of_numbers() -> None:
    told = dataclasses.asdict(of_three(estimates={"learning_rate[b]": {"t": 1.0}}))
    assert told["bases"]["learning_rate"] == 0.2
    assert told["estimates"].get("learning_rate") is None


def test_a_knob_of_that_name_is_itself_whatever_else_there_is() -> None:
    record = of_three(bases={"learning_rate": 0.4, "learning_rate[b]": 0.1}, powers={"learning_rate[b]": 2.0})
    assert record.bases["learning_rate"] == 0.4
    assert record.powers.get("learning_rate", 1.0) == 1.0


def test_a_record_that_holds_plain_dicts_is_unpickled_with_names_of_kinds() -> None:
    record = of_three()
    record.__setstate__({**record.__dict__, "bases": dict(record.bases)})
    assert record.bases["learning_rate"] == 0.2
