"""Many learning rates that are judged together: one row, one pair of figures and one section of a page."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hdet.record import WindowRecord
from hdet.report import ReportedRun, overview, page, save_figures
from hdet.report.together import Heading, headings

RATES = [f"learning_rate[{name}]" for name in ("a.weight", "b.weight", "c.weight", "d.weight", "others")]


def history(rates: list[str] = RATES, windows: int = 5, **of_one: Any) -> list[WindowRecord]:
    """The first rate is judged otherwise in the last window where something is said of one."""
    found = []
    for w in range(windows):
        own = {"slope": -0.2 * w, "stderr": 0.1, "level": 2.0}
        estimates = {name: {**own, "step_ratio": 1.0 + place} for place, name in enumerate(rates)}
        if w == windows - 1:
            estimates[rates[0]].update(of_one)
        values = {name: 1e-3 * (1 + place) * (w + 1) for place, name in enumerate(rates)}
        learned = {
            name: {"start": 1e-3, "opened": now, "closed": now * (w + 2) / (w + 1)} for name, now in values.items()
        }
        found.append(
            WindowRecord(
                window=w,
                start=10 * w,
                stop=10 * w + 10,
                bases={**values, "dropout": 0.1},
                values={},
                losses=[3.0 - 0.2 * w],
                estimates={**estimates, "dropout": own},
                moves={**dict.fromkeys(rates, 0.3), "dropout": 0.0},
                merged=True,
                learned=learned,
            )
        )
    return found


def test_rates_of_one_judgement_are_shown_together_beyond_three() -> None:
    assert headings([history()]) == [Heading(tuple(RATES)), Heading(("dropout",))]
    assert [one.name for one in headings([history()])] == ["learning_rate of 5 groups", "dropout"]
    assert headings([history(RATES[:3])]) == [Heading((name,)) for name in (*RATES[:3], "dropout")]


def test_one_that_is_judged_otherwise_stands_alone() -> None:
    """In whichever run and window; where it stands among the others is its own all the same."""
    other = history(slope=7.0)
    for histories in ([other], [history(), other]):
        assert headings(histories) == [Heading((RATES[0],)), Heading(tuple(RATES[1:])), Heading(("dropout",))]
    assert len(headings([history(step_ratio=9.0)])) == 2


def test_a_run_with_other_groups_does_not_part_those_that_are_alike() -> None:
    fewer = [replace(record, estimates={**record.estimates}) for record in history(RATES[:4])]
    found = headings([history(), fewer])
    assert Heading(tuple(RATES[:4])) in found
    assert Heading((RATES[4],)) in found


def test_figures_draw_them_in_one_row(tmp_path: Path) -> None:
    figure = overview(history())
    assert len(figure.axes) == 1 + 2 * 2
    values = figure.axes[1]
    assert values.get_ylabel() == "learning_rate of 5 groups"
    assert sorted(float(patch.get_data().values[-1]) for patch in values.patches) == pytest.approx(
        [1e-3 * (1 + place) * 5 for place in range(5)]
    )
    written = save_figures(history(), tmp_path, formats=["svg"])
    assert sorted(path.stem for path in written) == [
        "0_learning_rate_of_5_groups_evidence",
        "0_learning_rate_of_5_groups_values",
        "1_dropout_evidence",
        "1_dropout_values",
        "losses",
        "overview",
    ]


@pytest.mark.parametrize("runs", [1, 2])
def test_a_page_has_one_row_and_one_section_for_them_and_a_table_of_each(runs: int) -> None:
    made = page([ReportedRun(f"run {number}", history()) for number in range(runs)])
    assert re.findall(r"<h2>(.*?)</h2>", made)[2:4] == ["learning_rate of 5 groups", "dropout"]
    assert made.count('<th scope="row">learning_rate of 5 groups</th>') == 2 * runs  # at a glance, and importance
    assert "<strong>0.006 to 0.03</strong> (&times;&nbsp;6 to 30)" in made
    assert '<td data-label="set to">0.001</td>' in made
    for place, name in enumerate(RATES):
        row = rf"<th scope=\"row\">{re.escape(name)}</th><td>0.001</td><td>{6e-3 * (1 + place):.4g}</td>"
        assert len(re.findall(row, made)) == runs
