"""The table of Schedule-Free runs, alone and under the recipe."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import schedule_free


@pytest.mark.parametrize(("seeds", "alone"), [("1", "1.000 +- nan"), ("3", "2.000 +- 1.000")])
def test_the_table_has_means_and_standard_deviations_where_there_are_any(
    seeds: str, alone: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(schedule_free, "run", lambda seed, scale, explored: (1.0 + seed, 0.5))
    monkeypatch.setattr(sys, "argv", ["schedule_free.py", "--seeds", seeds])
    schedule_free.main()
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split(" | ")[1] for row in rows] == [alone] * len(schedule_free.SCALES)
