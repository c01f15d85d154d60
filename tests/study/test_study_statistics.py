"""Means, paired differences, Holm; and the tables that show them."""

import csv
import io
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from hdet.study.statistics import holm, rows
from hdet.study.tables import as_csv, as_latex, as_markdown, as_text

X, Y, Z = (("v", "x"),), (("v", "y"),), (("v", "z"),)


def test_a_paired_difference_by_hand() -> None:
    # differences .5, .4, .6: mean .5, sd .1, t = .5 / (.1 / sqrt 3) = 8.66 on 2 degrees of freedom
    found = rows({X: {0: 1.0, 1: 2.0, 2: 3.0}, Y: {0: 1.5, 1: 2.4, 2: 3.6}}, {"v": "x"})
    assert (found[0].is_baseline, found[1].is_baseline) == (True, False)
    assert found[0].mean == pytest.approx(2.0)
    assert found[0].stderr == pytest.approx(1 / math.sqrt(3))
    assert found[1].difference == pytest.approx(0.5)
    t = 0.5 / (0.1 / math.sqrt(3))
    assert found[1].p == pytest.approx(2 * stats.t.sf(t, 2))
    assert found[1].interval == pytest.approx(stats.t.ppf(0.975, 2) * 0.1 / math.sqrt(3))
    # unpaired, the scatter over seeds would hide it
    assert stats.ttest_ind([1, 2, 3], [1.5, 2.4, 3.6]).pvalue > 0.5


def test_pairs_are_by_seed_whatever_the_order_and_failures_leave_the_comparison() -> None:
    found = rows({X: {2: 3.0, 0: 1.0, 1: math.nan, 7: 1.0}, Y: {0: 1.5, 1: 2.4, 2: 3.6, 8: 4.0}}, {"v": "x"})
    assert (found[0].count, found[0].failed) == (3, 1)
    assert found[1].pairs == 2
    assert found[1].difference == pytest.approx(0.55)


def test_comparisons_stay_within_the_other_factors() -> None:
    groups = {
        (("g", g), ("v", v)): {0: base + shift, 1: base + 2 * shift}
        for g, base in (("a", 1.0), ("b", 10.0))
        for v, shift in (("x", 0.0), ("y", 0.1))
    }
    found = rows(groups, {"v": "x"})
    assert [row.is_baseline for row in found] == [True, False, True, False]
    assert found[1].difference == pytest.approx(0.15)
    assert found[3].difference == pytest.approx(0.15)
    assert found[3].adjusted >= found[3].p
    assert all(math.isnan(row.difference) for row in rows(groups, {}))


def test_equal_runs_differ_by_nothing() -> None:
    (_, same) = rows({X: {0: 1.0, 1: 2.0}, Y: {0: 1.0, 1: 2.0}}, {"v": "x"})
    assert (same.difference, same.p, same.interval) == (0.0, 1.0, 0.0)


def test_one_seed_gives_a_difference_and_no_test() -> None:
    (_, row) = rows({X: {0: 1.0}, Y: {0: 3.0}}, {"v": "x"})
    assert row.difference == 2.0
    assert math.isnan(row.p)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_lies_between_the_raw_values_and_bonferroni_and_keeps_their_order(p: list[float]) -> None:
    adjusted = np.array(holm(p))
    assert (adjusted >= p).all()
    assert (adjusted <= np.minimum(1.0, len(p) * np.array(p)) + 1e-12).all() or len(p) == 1
    assert (np.diff(adjusted[np.argsort(p, kind="stable")]) >= 0).all()


def test_the_family_error_is_kept_where_no_difference_exists() -> None:
    """1000 studies of 4 null comparisons: Holm rejects any in 5 %, raw p-values in far more."""
    rng = np.random.default_rng(0)
    any_raw = any_adjusted = 0
    for _ in range(1000):
        groups = {(("v", str(v)),): dict(enumerate(rng.standard_normal(5))) for v in range(5)}
        found = rows(groups, {"v": "0"})[1:]
        any_raw += min(row.p for row in found) < 0.05
        any_adjusted += min(row.adjusted for row in found) < 0.05
    assert any_adjusted < 70
    assert any_raw > 100


TABLE = rows({X: {0: 1.0, 1: 2.0, 2: 3.0}, Y: {0: 1.5, 1: 2.4, 2: math.nan}, Z: {0: math.nan}}, {"v": "x"})


def test_the_text_table() -> None:
    lines = as_text(TABLE, "test_loss").splitlines()
    assert lines[0].split() == ["v", "seeds", "test_loss", "difference", "p", "p", "(Holm)"]
    assert lines[2].split()[:4] == ["x", "3", "2.0000", "+-"]
    assert "2 (+1 diverged)" in lines[3]
    assert "+0.4500 +- 0.6353" in lines[3]
    assert lines[4].split()[-1] == "-"
    assert "Holm's correction for the 1 comparisons" in lines[-1]


def test_the_csv_table_holds_full_precision() -> None:
    read = list(csv.DictReader(io.StringIO(as_csv(TABLE))))
    assert read[1]["v"] == "y"
    assert float(read[1]["p"]) == TABLE[1].p
    assert float(read[0]["stderr"]) == TABLE[0].stderr


def test_markdown_and_latex() -> None:
    markdown = as_markdown(TABLE, "test_loss").splitlines()
    assert markdown[0].startswith("| v | seeds | test_loss |")
    assert {line.count("|") for line in markdown[:5]} == {7}
    latex = as_latex(TABLE, "test_loss")
    assert r"test\_loss" in latex
    assert r"$\pm$" in latex
    assert latex.count(r"\\") == 4
    assert latex.count(" & ") == 4 * 5
