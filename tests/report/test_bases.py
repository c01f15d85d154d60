"""The picture of a run."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from hdet.errors import ConfigError, MissingExtraError
from hdet.history import WindowRecord
from hdet.report import draw_bases


def history(knobs: int, windows: int = 6) -> list[WindowRecord]:
    names = [f"knob_{index}" for index in range(knobs)]
    return [
        WindowRecord(
            window=w,
            start=10 * w,
            stop=10 * w + 10,
            bases=dict.fromkeys(names, 0.1 * 3.0**w),
            values={name: [0.09 * 3.0**w, 0.11 * 3.0**w] for name in names},
            losses=[1.0, None],
            estimates={name: {"slope": (-1.0) ** w * w, "stderr": 0.1 if w % 3 else None, "t": None} for name in names},
            moves=dict.fromkeys(names, 0.0),
            merged=True,
            faults=[{"kind": "non_finite", "replica": 1, "step": 3}] if w == 2 else [],
        )
        for w in range(windows)
    ]


def pixels(path: Path) -> np.ndarray:  # type: ignore[type-arg]
    from matplotlib import image

    return np.asarray(image.imread(path))


@pytest.mark.parametrize("knobs", [1, 4])
def test_a_picture_has_a_row_for_each_knob(tmp_path: Path, knobs: int) -> None:
    draw_bases(history(knobs), tmp_path / "bases.png", title="a run")
    height, width, _ = pixels(tmp_path / "bases.png").shape
    assert width == 1210
    assert height == pytest.approx(110 * (0.7 + 2.1 * knobs), abs=2)


def test_the_picture_shows_bases_and_evidence(tmp_path: Path) -> None:
    """Another base or another t must change it, on its own side."""
    one = history(1)
    draw_bases(one, tmp_path / "one.png")
    moved = [record.__class__(**{**vars(record), "bases": {"knob_0": 0.1}}) for record in one]
    draw_bases(moved, tmp_path / "moved.png")
    surer = [
        record.__class__(**{**vars(record), "estimates": {"knob_0": {"slope": -1.0, "stderr": 0.5}}}) for record in one
    ]
    draw_bases(surer, tmp_path / "surer.png")
    plain, other, third = (pixels(tmp_path / f"{name}.png") for name in ("one", "moved", "surer"))
    half = plain.shape[1] // 2
    assert (plain[:, : half - 40] != other[:, : half - 40]).any()
    assert (plain[:, half + 40 :] != third[:, half + 40 :]).any()


def test_infinite_evidence_and_zero_bases_are_drawn(tmp_path: Path) -> None:
    records = [
        record.__class__(
            **{
                **vars(record),
                "bases": {"knob_0": 0.0},
                "values": {"knob_0": [0.0, 0.0]},
                "estimates": {"knob_0": {"slope": 1.0, "stderr": 0.0, "t": math.inf}},
            }
        )
        for record in history(1)
    ]
    draw_bases(records, tmp_path / "bases.png")
    assert (tmp_path / "bases.png").stat().st_size > 1000


def test_nothing_to_draw_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    for empty in ([], history(0)):
        with pytest.raises(ConfigError, match="no base to draw"):
            draw_bases(empty, tmp_path / "bases.png")
    assert not any(tmp_path.iterdir())


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"matplotlib.*hdet\[cli\]"):
        draw_bases(history(1), tmp_path / "bases.png")
