"""A window of tens of thousands of replicas: its record stays small, and says of all what it says of few."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import hdet
from hdet.record import MOST_REPLICAS, WindowRecord
from hdet.report.series import course

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import control_plane as benchmark


def windows(n: int, bad: int = 0, count: int = 2) -> tuple[list[WindowRecord], list[NDArray[np.float64]]]:
    """Records of some windows, and the losses they were made of; the last `bad` replicas are not finite."""
    engine = benchmark.engine_of(n, 2)
    seen, gather = [], engine.home.gather

    def spoiled(rows: torch.Tensor) -> NDArray[np.float64]:
        table = gather(rows)
        table[n - bad :, 0] = math.nan
        seen.append(table[:, 0].copy())
        return table

    engine.home.gather = spoiled
    records = [engine.step([torch.ones(())]) for _ in range(count)]
    return [record for record in records if record is not None], seen


def test_a_record_does_not_grow_with_the_number_of_replicas() -> None:
    few, many = (len(windows(n)[0][-1].to_json()) for n in (MOST_REPLICAS, 2**14))
    assert many < 1.5 * few


def test_what_it_says_of_all_is_true_of_all() -> None:
    (record, _), (losses, *_) = windows(256, bad=3)
    assert record.loss == losses[np.isfinite(losses)].mean()
    assert record.losses == losses[:MOST_REPLICAS].tolist()
    assert record.replicas == 256
    for knob, values in record.values.items():
        assert len(values) == MOST_REPLICAS
        assert record.range(knob) == (min(values), max(values))
    assert WindowRecord.from_json(record.to_json()) == record
    assert course([record], "knob_0").low == [pytest.approx(record.range("knob_0")[0], rel=1e-3)]


def test_few_replicas_are_recorded_one_by_one() -> None:
    (record, _), (losses, *_) = windows(8)
    assert (record.losses, record.mean_loss, record.ranges) == (losses.tolist(), None, {})
    assert record.range("knob_0") == (min(record.values["knob_0"]), max(record.values["knob_0"]))


def test_faults_of_very_many_are_summed_up() -> None:
    (record, _), _ = windows(256, bad=200)
    *each, more = record.faults
    assert len(each) == MOST_REPLICAS
    assert more["more_replicas"] == 200 - MOST_REPLICAS
    assert more["kind"] == each[0]["kind"] == "non_finite"


def test_a_history_written_without_these_fields_reads() -> None:
    record = WindowRecord(0, 0, 1, {"rate": 1.0}, {"rate": [0.5, 2.0]}, [1.0, 3.0], {}, {"rate": 0.0}, True)
    line = record.to_json()
    for field in ("replicas", "ranges", "mean_loss"):
        line = line.replace(f', "{field}": 0', "").replace(f', "{field}": {{}}', "").replace(f', "{field}": null', "")
    assert "mean_loss" not in line
    again = WindowRecord.from_json(line)
    assert (again.loss, again.range("rate")) == (2.0, (0.5, 2.0))
    assert hdet.history.WindowRecord is WindowRecord
