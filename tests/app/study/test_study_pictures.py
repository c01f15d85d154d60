"""A study's pictures take names as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hdet.app.study import pictures
from hdet.app.study.statistics import Row, rows

FORMULA = r"$x\foo$"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is drawn, from the first on."""
    found: list[Any] = []

    def blank_figure(width: float, height: float) -> Any:
        found.append(blank(width, height))
        return found[-1]

    blank = pictures.blank_figure
    monkeypatch.setattr(pictures, "blank_figure", blank_figure)
    return found


def legend(figure: Any) -> list[str]:
    return [text.get_text().strip() for text in figure.axes[0].get_legend().get_texts()]


def of(*levels: tuple[str, str]) -> list[Row]:
    """A row a level of the last factor, with what it takes to be drawn."""
    return rows({(*levels, (FORMULA, level)): {0: 1.0, 1: 2.0} for level in (FORMULA, "other")}, {}, 0.05)


def test_a_dollar_begins_no_formula(tmp_path: Path) -> None:
    curve = [[(1, 1.0), (2, 0.5)]]
    pictures.draw_curves({((FORMULA, FORMULA), ("b", FORMULA)): curve}, tmp_path / "curves.png", title=FORMULA)
    pictures.draw_factor(of(("a", FORMULA)), FORMULA, tmp_path / "factor.png", metric=FORMULA)
    assert {path.read_bytes()[:4] for path in tmp_path.iterdir()} == {b"\x89PNG"}


def test_an_underscore_takes_no_name_out_of_a_legend(figures: list[Any], tmp_path: Path) -> None:
    curve = [[(1, 1.0), (2, 0.5)]]
    curves = {(("variant", name),): curve for name in ("_plain", "full")}
    pictures.draw_curves(curves, tmp_path / "curves.png", title="t")
    pictures.draw_factor(of(("_rate", "0.1")), FORMULA, tmp_path / "factor.png", metric="loss")
    assert [legend(figure) for figure in figures] == [["_plain", "full"], ["_rate=0.1"]]
