import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hdet.controllers import GatedState, NoState, from_plain, to_plain
from hdet.controllers.estimators.estimator import FloatArray
from hdet.controllers.rules.stall import StallState
from hdet.errors import CheckpointError


@dataclass(frozen=True)
class Example:
    number: float
    count: int
    flag: bool
    table: FloatArray


LIKE = Example(0.0, 0, False, np.zeros(0))


def test_round_trip_through_json_is_exact() -> None:
    state = Example(0.1 + 0.2, 3, True, np.array([[1 / 3, -0.0], [np.pi, 1e-300]]))
    back = from_plain(LIKE, json.loads(json.dumps(to_plain(state))))
    assert (back.number, back.count, back.flag) == (0.1 + 0.2, 3, True)
    assert type(back.flag) is bool
    assert type(back.count) is int
    assert back.table.tobytes() == state.table.tobytes()
    assert back.table.shape == (2, 2)


def test_numbers_regain_their_types() -> None:
    back = from_plain(LIKE, {"number": 1, "count": 3.0, "flag": 1, "table": [1, 2]})
    assert [type(value) for value in (back.number, back.count, back.flag)] == [float, int, bool]
    assert back.table.dtype == np.float64


def test_plain_is_made_of_builtins() -> None:
    plain = to_plain(Example(1.0, 2, False, np.ones(2)))
    assert plain == {"number": 1.0, "count": 2, "flag": False, "table": [1.0, 1.0]}
    assert type(plain["table"]) is list


@dataclass(frozen=True)
class Loose:
    """As somebody writes it who works with NumPy."""

    table: np.ndarray[Any, Any]
    bare: np.ndarray  # type: ignore[type-arg]
    number: float = 0.0


@pytest.mark.parametrize("values", [[1.5, 2.5], [2, 3]])
def test_numpys_own_numbers_and_arrays_come_back(values: list[float]) -> None:
    plain = to_plain(Loose(np.array(values), np.array(values), np.float64(0.5)))
    assert type(plain["number"]) is float
    back = from_plain(Loose(np.zeros(0), np.zeros(0)), json.loads(json.dumps(plain)))
    assert back.table.tolist() == back.bare.tolist() == values


@pytest.mark.parametrize(
    ("state", "field", "damaged"),
    [
        (GatedState(), "variance", None),
        (GatedState(), "sums", 1.0),
        (GatedState(), "sums", [None]),
        (StallState(), "waited", math.nan),
        (StallState(), "since", math.inf),
    ],
)
def test_what_is_no_such_number_is_refused(state: Any, field: str, damaged: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"State\.{field} is .* in the checkpoint, which is damaged"):
        from_plain(state, {**to_plain(state), field: damaged})


def test_what_is_not_known_yet_may_be_so_again() -> None:
    later = StallState(lowest=0.5, since=3)
    assert from_plain(later, to_plain(StallState())) == StallState()


def test_a_foreign_state_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"Example has the fields .*'count'.*checkpoint \['number'\]"):
        from_plain(LIKE, {"number": 1.0})
    with pytest.raises(CheckpointError, match="NoState"):
        from_plain(NoState(), {"number": 1.0})
