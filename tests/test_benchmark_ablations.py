"""The ablations of the recipe: one part at a time (`rules.py`), all in one design (`screen.py`), and `schedules.py`."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import rules
import schedules
import screen
from search_parts import cell as cells
from search_parts import runner
from search_parts.cell import Cell, Result
from search_parts.found import all_tasks
from search_parts.task import Setting

import hdet
from hdet.controllers import Controller, Pooled
from hdet.recipes.recommended import choose

FACTORS = ["learning_rate: stall", "weight_decay: slope_sum gate=9", "guard: overshoot=None"]


def result(test: float, spoke: list[str]) -> Result:
    return Result(test, forward=1, backward=1, cost=1.0, seconds=0.1, code="", details={"spoke": spoke})


@pytest.mark.parametrize("factors", range(1, 33))
def test_no_factor_is_mixed_with_another_nor_with_two_others(factors: int) -> None:
    changed = screen.design(factors)
    signs = np.where(changed, 1, -1)
    assert not changed[0].any(), "the first row is the recipe"
    assert len({tuple(row) for row in changed}) > factors
    np.testing.assert_array_equal(signs.T @ signs, len(signs) * np.eye(factors))
    for one, other in combinations(range(factors), 2):
        assert not (signs[:, one] * signs[:, other] @ signs).any()


def test_a_factor_changes_what_it_names_and_nothing_else() -> None:
    changed = screen.Changed(FACTORS)
    rate, decay = changed.tables["learning_rate"], changed.tables["weight_decay"]
    assert rate == rules.TABLES["learning_rate"].without("stall")
    assert [rule.gate for rule in decay.rules if rule.kind == "slope_sum"] == [9.0]  # type: ignore[attr-defined]
    assert decay.without("slope_sum") == rules.TABLES["weight_decay"].without("slope_sum")
    assert changed.guard is not None
    assert changed.guard.overshoot is None
    assert screen.Changed([]).tables == rules.TABLES
    with pytest.raises(SystemExit, match="no rule or veto 'slope_sums'"):
        screen.Changed(["weight_decay: slope_sums gate=9"])
    for unknown in ("guard: rewound", "rate: stall"):
        with pytest.raises(SystemExit, match="is no change"):
            screen.Changed([unknown])


def test_an_effect_is_the_difference_of_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first factor costs 0.1, the second gains 0.02, the third does nothing; losses were made up."""
    table = tmp_path / "screen.csv"
    options = ["--tasks", "tabular", "--starts", "lr x1", "--seeds", "3", "4", "--csv", str(table), "--report"]
    monkeypatch.setattr(sys, "argv", ["screen.py", "--factors", *FACTORS, *options, "--out", str(tmp_path)])
    task, setting = all_tasks()["tabular"], rules.STARTS["lr x1"].setting(screen.BEST["tabular"])
    for row in screen.design(3):
        name = screen.Changed([one for one, own in zip(FACTORS, row, strict=True) if own]).key
        for seed in (3, 4):
            loss = 0.3 + 0.1 * row[0] - 0.02 * row[1] + 0.01 * seed
            cells.save(tmp_path, Cell("tabular", name, setting, task.steps, seed), result(loss, []))
    assert screen.main() == 0
    said = {line[: line.index("  ")]: line.split()[-5:] for line in capsys.readouterr().out.splitlines()[2:]}
    np.testing.assert_allclose([float(said[factor][0]) for factor in FACTORS], [0.1, -0.02, 0.0], atol=1e-4)
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == 2 * len(screen.design(3))
    assert rows[0]["test_loss"] == "0.33"


def test_a_table_of_runs_and_the_cells_that_broke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "runs.csv"
    columns = ["task", "seed", "test_loss", "lr"]
    rows = [("tabular", 3, 0.123456789, None), ("teacher", 4, float("nan"), "1e-4")]
    assert runner.finish([], table, columns, rows) == 0
    assert table.read_text().split() == ["task,seed,test_loss,lr", "tabular,3,0.123457,", "teacher,4,nan,1e-4"]
    assert runner.finish(["tabular: no disk"], None, columns, []) == 1
    assert "broke: tabular: no disk" in capsys.readouterr().err


def test_the_tables_are_the_recipes() -> None:
    model = torch.nn.Linear(2, 2)
    chosen = choose(model, torch.optim.AdamW(model.parameters()), total_steps=100)
    assert {one.knob.label: one.knob.controller for one in chosen if one.knob is not None} == rules.TABLES


def test_only_runs_that_a_part_had_a_say_in_are_made_again(tmp_path: Path) -> None:
    cell = Cell("tabular", "hdet", screen.BEST["tabular"], 800, 0)
    cells.save(tmp_path, cell, result(0.2, ["learning_rate: stall"]))
    parts = ["learning_rate: stall", "learning_rate: lower", rules.FALL]
    assert [one.contender for one in rules.changed(cell, parts, tmp_path)] == ["learning_rate: stall", rules.FALL]
    assert rules.FALL in rules.PARTS
    limited = ["learning_rate: lower", rules.MISLED, rules.LIMIT]
    assert [one.contender for one in rules.changed(cell, limited, tmp_path)] == [rules.LIMIT]
    caught_up = replace(cell, seed=1)
    cells.save(tmp_path, caught_up, result(0.2, ["learning_rate: catch_up"]))
    assert [one.contender for one in rules.changed(caught_up, limited, tmp_path)] == [rules.MISLED, rules.LIMIT]
    for part, changed in ((rules.LIMIT, "return"), (rules.MISLED, "catch_up")):
        free = rules.Without(part).tables["learning_rate"]
        others = [
            (rule.kind, other.kind)
            for rule, other in zip(free.rules, rules.TABLES["learning_rate"].rules, strict=True)
            if rule != other
        ]
        assert others == [(changed, changed)]
    together = rules.AND.join(["learning_rate: lower", "learning_rate: stall"])
    assert [one.contender for one in rules.changed(cell, [together], tmp_path)] == [together]


def test_a_part_is_left_out_of_what_all_rates_have_in_common(tmp_path: Path) -> None:
    task, setting = replace(all_tasks()["tabular"], steps=60), rules.BEST["tabular"]
    problem = task.problem(0, 0.0)
    model = problem.model()

    def controllers(contender: rules.Recommended) -> dict[str, Controller]:
        optimizer = task.optimizer(problem.groups(model), setting)
        return {knob.label: knob.controller for knob in contender.knobs(model, optimizer, 60)}

    recipe, altered = controllers(rules.RecommendedMatrices()), controllers(rules.Altered("matrices"))
    assert len(recipe) > 1
    assert recipe.items() <= altered.items()
    assert altered.keys() - recipe.keys() == {"weight_decay"}
    without = controllers(rules.Without("learning_rate: stall", "matrices"))
    for label, controller in recipe.items():
        assert isinstance(controller, Pooled)
        assert without[label] == controller.replace(common=rules.TABLES["learning_rate"].without("stall"))
    cell = Cell("tabular", "hdet", setting, 60, 0)
    cells.save(tmp_path, cell, result(0.2, ["learning_rate[layers.0.weight]: stall"]))
    said = rules.changed(cell, ["learning_rate: stall", "learning_rate: lower"], tmp_path)
    assert [one.contender for one in said] == ["learning_rate: stall"]


@pytest.mark.parametrize("shape", schedules.SHAPES)
@pytest.mark.parametrize(("warmup_steps", "expected"), [(None, 18), (0, 0)])
def test_the_recipe_follows_the_schedule_it_is_given(shape: str, warmup_steps: int | None, expected: int) -> None:
    task, contender = replace(all_tasks()["clusters"], steps=60), schedules.Along(shape, warmup_steps)
    problem = task.problem(0, 0.0)
    model = problem.model()
    probe = hdet.Probe(problem.loss, [problem.probe(0)])
    engine = contender.engine(task, Setting(lr=0.01, decay=0.1), problem, model, probe, 60, 0)
    (rate,) = (knob for knob in engine.knobs if isinstance(knob.spec, hdet.LearningRate))
    given = schedules.SHAPES[shape](0.01, 60)
    assert rate.schedule == given.with_warmup(expected)
    assert (rate.schedule == given) is (shape not in schedules.SHORT or warmup_steps == 0)
