"""Means, paired differences, Holm; and the tables that show them."""

import csv
import io
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from hdet.app.study.statistics import contrasts, holm, rows
from hdet.app.study.tables import Table, as_csv, as_latex, as_markdown, as_text

X, Y, Z = (("v", "x"),), (("v", "y"),), (("v", "z"),)


def test_a_paired_difference_by_hand() -> None:
    # differences .5, .4, .6: mean .5, sd .1, t = .5 / (.1 / sqrt 3) = 8.66 on 2 degrees of freedom
    found = rows({X: {0: 1.0, 1: 2.0, 2: 3.0}, Y: {0: 1.5, 1: 2.4, 2: 3.6}}, {"v": "x"})
    assert (found[0].is_baseline, found[1].is_baseline) == (True, False)
    assert found[0].mean == pytest.approx(2.0)
    assert found[0].stderr == pytest.approx(1 / math.sqrt(3))
    assert found[1].versus.difference == pytest.approx(0.5)
    t = 0.5 / (0.1 / math.sqrt(3))
    assert found[1].versus.p == pytest.approx(2 * stats.t.sf(t, 2))
    assert found[1].versus.interval == pytest.approx(stats.t.ppf(0.975, 2) * 0.1 / math.sqrt(3))
    # unpaired, the scatter over seeds would hide it
    assert stats.ttest_ind([1, 2, 3], [1.5, 2.4, 3.6]).pvalue > 0.5


def test_pairs_are_by_seed_whatever_the_order() -> None:
    (_, row) = rows({X: {2: 3.0, 0: 1.0, 1: 2.0}, Y: {0: 1.5, 1: 2.4, 2: 3.6}}, {"v": "x"})
    assert row.versus.pairs == 3
    assert row.versus.difference == pytest.approx(0.5)


@pytest.mark.parametrize("side", ["variant", "baseline"])
@pytest.mark.parametrize("lost", [math.nan, math.inf, None])
def test_nothing_is_tested_where_a_pair_diverged_or_is_missing(side: str, lost: float | None) -> None:
    """Runs that diverge were not the good ones: the mean of the others is no gain."""
    base: dict[int, float | None] = dict.fromkeys(range(5), 1.0)
    better: dict[int, float | None] = {seed: 0.9 + 0.001 * seed for seed in range(5)}
    whole = rows({X: base, Y: better}, {"v": "x"})[1].versus
    assert whole.p < 0.001
    hurt = {0: lost, 1: lost, 2: lost}
    groups = {X: {**base, **hurt}, Y: better} if side == "baseline" else {X: base, Y: {**better, **hurt}}
    found = rows(groups, {"v": "x"})
    row = found[1]
    assert math.isnan(row.versus.p)
    assert math.isnan(row.versus.interval)
    assert (row.versus.pairs, row.versus.seeds, row.versus.diverged) == (2, 5, 0 if lost is None else 3)
    for shown in (as_text(Table("loss", found)), as_markdown(Table("loss", found)), as_latex(Table("loss", found))):
        assert ("2 of 5" if lost is None else "2 of 5 (3 diverged)") in next(
            line for line in shown.splitlines() if line.lstrip("| ").startswith("y")
        )
        assert "No test where a pair diverged or is missing" in shown


def test_selection_by_divergence_finds_no_gain() -> None:
    """The variant's runs that would have ended worse than the baseline's diverge instead: no 'better' comes of it."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        base = rng.standard_normal(8)
        variant = base + 0.3 * rng.standard_normal(8)
        variant[variant - base > 0.1] = math.nan
        row = rows({X: dict(enumerate(base)), Y: dict(enumerate(variant))}, {"v": "x"})[1]
        assert math.isnan(row.versus.p) or not np.isnan(variant).any()


def test_comparisons_stay_within_the_other_factors() -> None:
    groups = {
        (("g", g), ("v", v)): {0: base + shift, 1: base + 2 * shift}
        for g, base in (("a", 1.0), ("b", 10.0))
        for v, shift in (("x", 0.0), ("y", 0.1))
    }
    found = rows(groups, {"v": "x"})
    assert [row.is_baseline for row in found] == [True, False, True, False]
    assert found[1].versus.difference == pytest.approx(0.15)
    assert found[3].versus.difference == pytest.approx(0.15)
    assert found[3].versus.adjusted >= found[3].versus.p
    assert all(math.isnan(row.versus.difference) for row in rows(groups, {}))


def test_equal_runs_differ_by_nothing() -> None:
    (_, same) = rows({X: {0: 1.0, 1: 2.0}, Y: {0: 1.0, 1: 2.0}}, {"v": "x"})
    assert (same.versus.difference, same.versus.p, same.versus.interval) == (0.0, 1.0, 0.0)


def test_a_constant_difference_is_not_tested() -> None:
    """Of a metric rounded to .01 three equal differences are no proof: a t-test would divide by nothing."""
    (_, row) = rows({X: {0: 0.90, 1: 0.92, 2: 0.91}, Y: {0: 0.91, 1: 0.93, 2: 0.92}}, {"v": "x"})
    assert row.versus.difference == pytest.approx(0.01)
    assert math.isnan(row.versus.p)
    assert math.isnan(row.versus.interval)
    assert as_text(Table("loss", [row])).splitlines()[2].split()[-2:] == ["-", "-"]


def test_one_seed_gives_a_difference_and_no_test() -> None:
    (_, row) = rows({X: {0: 1.0}, Y: {0: 3.0}}, {"v": "x"})
    assert row.versus.difference == 2.0
    assert math.isnan(row.versus.p)


def test_named_contrasts_are_the_family() -> None:
    rng = np.random.default_rng(1)
    groups = {
        (("g", g), ("v", v)): dict(enumerate(rng.standard_normal(5) + shift))
        for g in "ab"
        for shift, v in enumerate("xyz")
    }
    found = contrasts(groups, [("v", "x", "y"), ("v", "z", "x")])
    assert [(one.levels, one.first, one.second) for one in found] == [
        ((("g", "a"),), "x", "y"),
        ((("g", "b"),), "x", "y"),
        ((("g", "a"),), "z", "x"),
        ((("g", "b"),), "z", "x"),
    ]
    for one in found:
        a, b = (np.array(list(groups[(*one.levels, ("v", level))].values())) for level in (one.first, one.second))
        assert one.difference == pytest.approx(float(np.mean(a - b)))
        assert one.p == pytest.approx(stats.ttest_rel(a, b).pvalue)
    assert [one.adjusted for one in found] == holm([one.p for one in found])
    untested = rows(groups, {"v": "x"}, tested=False)
    assert all(math.isnan(row.versus.p) and math.isnan(row.versus.adjusted) for row in untested)
    assert untested[1].versus.interval > 0


def test_a_contrast_that_cannot_be_tested_still_counts_in_the_family() -> None:
    tested = {X: {0: 1.0, 1: 2.0, 2: 3.0}, Y: {0: 1.5, 1: 2.4, 2: 3.6}}
    pairs = [("v", "y", "x"), ("v", "z", "x")]
    one, other = contrasts({**tested, Z: {0: 1.0, 1: math.nan, 2: 2.0}}, pairs)
    assert one.adjusted == pytest.approx(2 * one.p)
    assert math.isnan(other.adjusted)


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
        any_raw += min(row.versus.p for row in found) < 0.05
        any_adjusted += min(row.versus.adjusted for row in found) < 0.05
    assert any_adjusted < 70
    assert any_raw > 100


TABLE = Table(
    "test_loss",
    rows({X: {0: 1.0, 1: 2.0, 2: 3.0}, Y: {0: 1.5, 1: 2.4, 2: 3.6}, Z: {0: math.nan, 1: None, 2: None}}, {"v": "x"}),
)


def test_the_text_table() -> None:
    lines = as_text(TABLE).splitlines()
    assert lines[0].split() == ["v", "seeds", "test_loss", "difference", "pairs", "p", "p", "(Holm)"]
    assert lines[2].split()[:4] == ["x", "3", "2.0000", "+-"]
    assert "+0.5000 +- 0.2484  3 " in lines[3]
    assert lines[4].split() == ["z", "0", "of", "3", "(1", "diverged)", *"--", "0", "of", "3", "(1", "diverged)", *"--"]
    assert "95 % confidence interval each, not corrected" in lines[6]
    assert "Holm's correction for the 2 comparisons with the baseline" in lines[6]
    assert lines[7] == "Incomplete: 2 of 9 cells have no test_loss yet."
    assert "80 % confidence" in as_text(replace(TABLE, level=0.2))
    assert as_text(replace(TABLE, remarks=["Held equal."])).endswith("\nHeld equal.\n")


def test_contrasts_stand_below_the_rows_and_take_their_tests() -> None:
    groups = {(("g", "a"), *X): {0: 1.0, 1: 2.0, 2: 3.0}, (("g", "a"), *Y): {0: 1.5, 1: 2.4, 2: 3.6}}
    table = Table("loss", rows(groups, {"v": "x"}, tested=False), contrasts(groups, [("v", "y", "x")]))
    lines = as_text(table).splitlines()
    assert lines[0].split() == ["g", "v", "seeds", "loss", "difference", "pairs"]
    assert lines[5].split()[:2] == ["g", "contrast"]
    assert lines[7].split() == ["a", "y", "-", "x", "+0.5000", "+-", "0.2484", "3", "0.0131", "0.0131"]
    assert "the 1 named contrast." in lines[-1]
    assert as_latex(table).count(r"\begin{tabular}") == 2
    assert as_markdown(table).count("\n| --- |") == 2
    (read,) = csv.DictReader(io.StringIO(as_csv(table.contrasts)))
    assert (read["g"], read["first"], read["second"]) == ("a", "y", "x")
    assert float(read["p"]) == table.contrasts[0].p


def test_seconds_are_shown_where_they_were_asked_for() -> None:
    found = rows({X: {0: 1.0}, Y: {0: None}}, {}, seconds={X: 12.34})
    lines = as_text(Table("loss", found)).splitlines()
    assert lines[0].split() == ["v", "seeds", "loss", "seconds"]
    assert lines[2].split() == ["x", "1", "1.0000", "12.3"]
    assert lines[3].split() == ["y", "0", "of", "1", "-", "-"]


def test_the_csv_table_holds_full_precision() -> None:
    read = list(csv.DictReader(io.StringIO(as_csv(TABLE.rows))))
    assert read[1]["v"] == "y"
    assert float(read[1]["p"]) == TABLE.rows[1].versus.p
    assert float(read[0]["stderr"]) == TABLE.rows[0].stderr
    assert (read[2]["seeds"], read[2]["count"], read[2]["failed"]) == ("3", "0", "1")


def test_markdown_and_latex() -> None:
    markdown = as_markdown(TABLE).splitlines()
    assert markdown[0].startswith("| v | seeds | test_loss |")
    assert {line.count("|") for line in markdown[:5]} == {8}
    latex = as_latex(TABLE)
    assert r"test\_loss" in latex
    assert r"$\pm$" in latex
    assert latex.count(r"\\") == 4
    assert latex.count(" & ") == 4 * 6


def test_latex_takes_any_name() -> None:
    found = rows({(("a_b", "x^2 ~ \\alpha|<0.1>{}"),): {0: 1.0}}, {})
    assert (
        r"x\textasciicircum{}2 \textasciitilde{} \textbackslash{}alpha\textbar{}$<$0.1$>$\{\} & 1 & 1.0000 \\"
        in as_latex(Table("loss", found)).splitlines()
    )
