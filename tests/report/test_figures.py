"""The figures of a run: what is drawn, read back from the figure itself."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex

from hdet.errors import ConfigError, MissingExtraError
from hdet.history import History
from hdet.record import WindowRecord
from hdet.report import course, evidence, losses, overview, save_figures
from hdet.report.figures import BLUE, GREY, RED, blank_figure


def history(knobs: int = 1, windows: int = 6) -> list[WindowRecord]:
    names = [f"knob_{index}" for index in range(knobs)]
    moves = [0.5, 0.0, -0.5, 0.0, 0.0, 0.0]
    learned = [0.1, 0.165, 0.165, 0.1, 0.1, 0.1, 0.1]
    return [
        WindowRecord(
            window=w,
            start=10 * w,
            stop=10 * w + 10,
            bases=dict.fromkeys(names, learned[w] * (1 - w / 6)),
            values={name: [0.9 * learned[w] * (1 - w / 6), 1.1 * learned[w] * (1 - w / 6)] for name in names},
            losses=[3.0 - 0.2 * w, None if w == 2 else 3.2 - 0.2 * w],
            estimates={
                name: {
                    "slope": [-3.0, 0.5, 0.1, 0.5, 0.5, 0.5][w],
                    "stderr": 1.0 if w != 4 else None,
                    "level": 3.5 - 0.2 * w,
                    "averaged": {"slope": [None, -0.3, 3.0, 0.5, None, 0.5][w], "stderr": None if w == 0 else 1.0},
                }
                for name in names
            },
            moves=dict.fromkeys(names, moves[w]),
            merged=True,
            faults=[{"kind": "non_finite", "replica": 1, "step": 23}] if w == 2 else [],
            learned={name: {"start": 0.1, "opened": learned[w], "closed": learned[w + 1]} for name in names},
        )
        for w in range(windows)
    ]


def lines(axis: Any, **wanted: Any) -> list[list[tuple[float, float]]]:
    """The lines of an axis whose properties are as wanted, as points."""
    found = [line for line in axis.lines if all(getattr(line, f"get_{name}")() == is_ for name, is_ in wanted.items())]
    return [[(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)] for line in found]


def test_there_are_losses_and_a_row_for_each_knob() -> None:
    for knobs in (1, 4):
        figure = overview(history(knobs), title="a run")
        assert len(figure.axes) == 1 + 2 * knobs
        assert [axis.get_ylabel() for axis in figure.axes[1::2]] == [f"knob_{index}" for index in range(knobs)]


def test_training_and_held_out_loss_are_drawn_and_a_failed_replica_is_left_out() -> None:
    [axis] = losses(history()).axes
    training, held_out = (line.get_ydata().tolist() for line in axis.lines[:2])
    assert training == pytest.approx([3.1, 2.9, 2.6, 2.5, 2.3, 2.1])
    assert held_out == pytest.approx([3.5, 3.3, 3.1, 2.9, 2.7, 2.5])


def test_the_losses_of_one_window_are_points() -> None:
    """A line of one point would not be seen."""
    axis = overview(history(windows=1)).axes[0]
    assert [line.get_marker() for line in axis.lines] == [".", "."]
    assert {line.get_marker() for line in overview(history()).axes[0].lines} == {"None"}


def test_learned_value_and_schedule_are_told_apart() -> None:
    [axis] = course(history(), "knob_0").axes
    [stairs] = [patch for patch in axis.patches if hasattr(patch, "get_data")]
    assert stairs.get_data().values.tolist() == [0.1, 0.165, 0.165, 0.1, 0.1, 0.1]
    assert stairs.get_data().edges.tolist() == [0, 10, 20, 30, 40, 50, 60]
    [base] = lines(axis, linestyle="--", color=GREY)
    assert [y for _, y in base] == pytest.approx([record.bases["knob_0"] for record in history()])


def test_levels_are_a_band() -> None:
    [axis] = course(history(), "knob_0").axes
    band = axis.collections[0]
    lowest = min(y for _, y in band.get_paths()[0].vertices)
    assert lowest == pytest.approx(0.9 * 0.1 / 6)


def test_moves_are_marked_by_shape_and_weak_ones_are_hollow() -> None:
    [axis] = course(history(), "knob_0").axes
    assert lines(axis, marker="^", markerfacecolor=BLUE) == [[(10.0, 0.165)]]
    assert lines(axis, marker="v", markerfacecolor=RED) == [[(30.0, 0.1)]]
    weaker = history()
    weaker[0].estimates["knob_0"]["slope"] = -1.5
    [axis] = course(weaker, "knob_0").axes
    assert lines(axis, marker="^", markerfacecolor="white") == [[(10.0, 0.165)]]


def test_the_evidence_that_decides_is_filled_and_up_asks_for_more() -> None:
    """Averaged weights where they were read; the last weights then stand beside them, hollow."""
    [axis] = evidence(history(), "knob_0").axes
    points = {
        (line.get_marker(), line.get_markerfacecolor() == "white"): [
            (float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)
        ]
        for line in axis.lines
        if line.get_marker() not in ("None", "")
    }
    assert points["o", False] == [(15.0, 0.3), (25.0, -3.0), (35.0, -0.5), (55.0, -0.5)]
    assert points["s", False] == [(5.0, 3.0)]
    assert points["s", True] == [(15.0, -0.5), (25.0, -0.1), (35.0, -0.5), (55.0, -0.5)]
    assert "D" not in {marker for marker, _ in points}
    assert [label.get_text() for label in axis.get_yticklabels()] == [f"{t:g}" for t in (-2, 0, 2)], (
        "the numbers are t, though up asks for more"
    )


def test_evidence_taken_ahead_of_the_schedule_is_told_apart() -> None:
    ahead = history()
    ahead[1].estimates["knob_0"].update(offset=0.3, averaged={"slope": None, "stderr": None})
    [axis] = evidence(ahead, "knob_0").axes
    assert lines(axis, marker="D") == [[(15.0, -0.5)]]


def test_faults_and_returns_are_marked_on_every_time_axis() -> None:
    turned = history()
    turned[3].faults.append({"kind": "rewound", "step": 20})
    figure = overview(turned)
    for axis in figure.axes:
        drawn = [
            (found.get_linestyle()[0][1] is None, [float(segment[0][0]) for segment in found.get_segments()])
            for found in axis.collections
            if hasattr(found, "get_segments") and to_hex(found.get_color()[0]) == RED.lower()
        ]
        assert (True, [40.0]) in drawn, "where the run went back, a solid line"
        assert (False, [30.0]) in drawn
    assert {text.get_text() for text in figure.axes[0].texts} == {"non_finite", "rewound"}


def test_infinite_evidence_zero_bases_and_missing_losses_are_drawn(tmp_path: Path) -> None:
    records = [
        dataclasses.replace(
            record,
            bases={"knob_0": 0.0},
            values={"knob_0": []},
            losses=[None, None],
            estimates={"knob_0": {"slope": 1.0, "stderr": 0.0, "t": math.inf, "level": None}},
            learned={"knob_0": {"start": 0.0, "opened": 0.0, "closed": 0.0}},
        )
        for record in history()
    ]
    overview(records).savefig(tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 1000


def test_a_history_without_learned_values_is_drawn_by_its_bases(tmp_path: Path) -> None:
    older = [dataclasses.replace(record, learned={}) for record in history()]
    [axis] = course(older, "knob_0").axes
    assert not [patch for patch in axis.patches if hasattr(patch, "get_data")]
    assert lines(axis, marker="^")[0][0][1] == older[0].bases["knob_0"]
    overview(older).savefig(tmp_path / "run.png")


def test_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    """A dollar begins no formula, and a control character is replaced."""
    name = "a$_$b\x1b[31m"
    records = [
        dataclasses.replace(record, bases={name: 1.0}, values={}, moves={name: 0.0}, estimates={}, learned={})
        for record in history()
    ]
    overview(records, title="100$ $").savefig(tmp_path / "run.svg")
    drawn = (tmp_path / "run.svg").read_text()
    assert "\x1b" not in drawn


def test_nothing_to_draw_is_refused() -> None:
    for empty in ([], history(0)):
        with pytest.raises(ConfigError, match="nothing to draw"):
            overview(empty)
    with pytest.raises(ConfigError, match=r"no knob 'other'.*knob_0"):
        course(history(), "other")


def test_every_figure_is_written_in_every_format(tmp_path: Path) -> None:
    hostile = history()
    for record in hostile:
        for field in (record.bases, record.values, record.estimates, record.moves, record.learned):
            field["../x"] = field.pop("knob_0")  # type: ignore[attr-defined, index]
    written = save_figures(hostile, tmp_path / "figures")
    assert len(written) == 3 * (2 + 2)
    assert {path.parent for path in written} == {tmp_path / "figures"}
    begins = {".pdf": b"%PDF", ".svg": b"<?xml", ".png": b"\x89PNG"}
    assert all(path.read_bytes().startswith(begins[path.suffix]) for path in written)
    assert "training loss" in (tmp_path / "figures" / "losses.svg").read_text(), "text stays text"
    with pytest.raises(ConfigError, match="not as gif"):
        save_figures(history(), tmp_path, formats=["gif"])


def test_of_a_run_without_knobs_the_losses_are_written(tmp_path: Path) -> None:
    """As of a plain one, reported beside a search."""
    assert save_figures(history(0), tmp_path, formats=["svg"]) == [tmp_path / "losses.svg"]
    with pytest.raises(ConfigError, match="nothing to draw"):
        save_figures([], tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_the_systems_own_error(tmp_path: Path) -> None:
    (tmp_path / "overview.pdf").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        save_figures(history(), tmp_path, formats=["pdf"])


def test_a_history_plots_itself_and_a_notebook_shows_it() -> None:
    plotted = History()
    for record in history():
        plotted.append(record)
    assert plotted.plot()._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (ImportError("numpy failed to import"), ConfigError, "cannot be imported: numpy failed to import; install it"),
        (ValueError("numpy.dtype size changed"), ConfigError, r"imported: numpy.dtype size changed; install it anew"),
        (AttributeError("_ARRAY_API not found"), ConfigError, r"imported: _ARRAY_API not found; install it anew"),
        (ModuleNotFoundError("none", name="PIL.Image"), MissingExtraError, r"^PIL is not installed"),
    ],
)
def test_a_matplotlib_that_cannot_be_imported_says_why(
    raised: Exception, kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Finder:
        def find_spec(self, name: str, *more: object) -> None:
            if name == "matplotlib.figure":
                raise raised

    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(kind, match=said):
        blank_figure(1.0, 1.0)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"matplotlib.*hdet\[report\]"):
        overview(history())
