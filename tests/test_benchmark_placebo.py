"""The benchmark of knobs without effect runs, and prints rates for both kinds of probe."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import placebo


def test_it_prints_a_row_for_each_kind_of_probe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["placebo", "--runs", "1", "--evidence", "Analytic"])
    placebo.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("Analytic")]
    assert [row[1] for row in rows] == ["fixed", "fresh"]
    for row in rows:
        by_sub_batch = float(row[-3])
        assert 0.0 < by_sub_batch < 5.0  # about 1 over many runs
