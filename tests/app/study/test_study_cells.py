"""From a declaration to the runs it means."""

import json
import math
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdet.app.run.config import RunConfig
from hdet.app.study import Budget, Study, StudyFolder, cells, shard
from hdet.app.study.declaration import label
from hdet.app.study.timing import seconds_per_step
from hdet.errors import ConfigError, HdetError

BASE: dict[str, Any] = {
    "task": {"kind": "imported", "path": "tiny_workload:make"},
    "steps": 12,
    "replicas": 2,
    "batch_size": 4,
    "window": 4,
    "signal": "training_loss",
    "knobs": [],
    "optimizer": {"lr": 0.1},
}


def study(**fields: Any) -> Study:
    return Study(**{"name": "s", "base": BASE, "seeds": 2, **fields})


def test_every_combination_of_levels_and_seeds() -> None:
    declared = study(grid={"gradients": ["shared", "local"], "optimizer.lr": [0.1, 0.2, 0.3]}, seeds=(4, 9))
    found = cells(declared)
    assert len(found) == 12
    assert len({cell.key for cell in found}) == 12
    assert {(c.config.gradients, c.config.optimizer.lr, c.config.seed) for c in found if c.config} == {
        (g, lr, seed) for g in ("shared", "local") for lr in (0.1, 0.2, 0.3) for seed in (4, 9)
    }
    assert str(found[1]) == "gradients=shared  optimizer.lr=0.1  seed=9"


def test_any_field_can_be_varied_deep_ones_and_whole_lists() -> None:
    knobs = {"none": [], "rate": [{"kind": "learning_rate", "spread": {"kind": "two_level", "width": 0.1}}]}
    declared = study(grid={"knobs": knobs, "window": [3, {"kind": "growing"}], "task.options.fail": [True]})
    found = cells(declared)
    assert [len(c.config.knobs) for c in found[::2] if c.config] == [0, 0, 1, 1]
    assert found[2].levels == {"knobs": "none", "window": "growing", "task.options.fail": "true"}
    nested = study(grid={"knobs": {"rate": knobs["rate"]}, "knobs.0.spread.width": [0.1, 0.3]})
    assert [c.config.knobs[0].spread.width for c in cells(nested)[::2] if c.config] == [0.1, 0.3]


def test_a_level_may_be_a_date_or_any_text() -> None:
    declared = study(grid={"task.options.fail": [date(2020, 1, 1), "\N{GRINNING FACE}"]}, seeds=1)
    found = [(list(c.levels.values()), c.config.task.to_dict()["options"]["fail"]) for c in cells(declared) if c.config]
    assert found == [(['"2020-01-01"'], "2020-01-01"), (["\N{GRINNING FACE}"], "\N{GRINNING FACE}")]


def test_variants_lie_over_the_grid_and_equal_runs_share_a_folder() -> None:
    declared = study(
        grid={"gradients": ["shared", "local"]},
        variants={"plain": {"gradients": "shared"}, "other": {"optimizer.lr": 0.5}},
    )
    found = cells(declared)
    assert len(found) == 8
    assert len({cell.key for cell in found}) == 6
    assert found[0].key == found[4].key
    assert found[0].levels != found[4].levels


def test_budgets_hold_equal_what_they_say() -> None:
    grid = {"replicas": [1, 2, 4], "batch_size": [4, 8]}
    for cell in cells(study(grid=grid, budget={"hold": "samples", "total": 640})):
        assert cell.samples == 640
    assert {c.config.steps for c in cells(study(grid=grid, budget={"hold": "steps", "total": 7})) if c.config} == {7}
    timed = cells(study(grid=grid, budget={"hold": "seconds", "total": 10}), timer=lambda config: 0.1 * config.replicas)
    assert [c.config.steps for c in timed[::4] if c.config] == [100, 50, 25]
    with pytest.raises(ConfigError, match="does not pay for a single step"):
        cells(study(budget={"hold": "samples", "total": 5}))
    with pytest.raises(ConfigError, match="needs total"):
        Budget(hold="samples")


@pytest.mark.parametrize("steps", [5, 50])
@pytest.mark.parametrize(
    "schedule",
    ["one_cycle", {"kind": "linear_warmup", "steps": 3, "schedule": "cosine"}],
    ids=["alone", "in another one"],
)
def test_a_budget_stretches_the_schedule_that_followed_the_run(schedule: Any, steps: int) -> None:
    declared = study(base={**BASE, "schedule": schedule}, budget={"hold": "steps", "total": steps})
    for cell in cells(declared):
        assert cell.config is not None
        assert cell.config.schedule is not None
        assert cell.config.schedule.total_steps == steps


def test_a_length_of_the_schedules_own_is_kept() -> None:
    """Be it the run's as declared, or that of a schedule in it."""
    for schedule in ({"kind": "cosine"}, {"kind": "linear_warmup", "steps": 3, "schedule": {"kind": "cosine"}}):
        schedule.get("schedule", schedule)["total_steps"] = 12  # type: ignore[attr-defined, index]
        base = {**BASE, "schedule": schedule}
        (cell, *_) = cells(study(base=base, budget={"hold": "steps", "total": 5}))
        assert cell.config is not None
        assert cell.config.schedule is not None
        assert cell.config.schedule.total_steps == 12
        with pytest.raises(ConfigError, match=r"ends after 12 steps and the run has 50; .*leave it out of the run's"):
            cells(study(base=base, budget={"hold": "steps", "total": 50}))


def test_quick_takes_fewer_seeds_and_its_fields_have_the_last_word() -> None:
    declared = study(
        seeds=5, grid={"steps": [12, 13]}, quick={"seeds": 1, "set": {"steps": 5}}, variants={"a": {"steps": 9}}
    )
    found = cells(declared, quick=True)
    assert [(c.seed, c.config.steps) for c in found if c.config] == [(0, 5), (0, 5)]
    assert declared.quickened().name == "s-quick"


def test_a_quick_version_that_is_the_study_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="--quick would change nothing"):
        cells(study(seeds=2), quick=True)
    assert len(cells(study(seeds=3), quick=True)) == 2


@settings(max_examples=30)
@given(count=st.integers(1, 9), cells_=st.integers(1, 12))
def test_shards_are_a_partition(count: int, cells_: int) -> None:
    everything = cells(study(grid={"optimizer.lr": [0.1 * (i + 1) for i in range(cells_)]}, seeds=1))
    parts = [shard(everything, f"{index}/{count}") for index in range(1, count + 1)]
    assert sorted(cell.key for part in parts for cell in part) == sorted(cell.key for cell in everything)


@pytest.mark.parametrize("part", ["0/3", "4/3", "1", "a/b", "-1/2", "1/0"])
def test_a_shard_that_cannot_be(part: str) -> None:
    with pytest.raises(ConfigError, match="1 <= i <= n"):
        shard(cells(study()), part)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base": None}, "either base"),
        ({"script": ["a"]}, "either base"),
        ({"grid": {"variant": [1]}}, "factors already"),
        ({"grid": {"steps": []}}, "steps has no values"),
        ({"grid": {"steps": [3, 3]}}, "a value twice"),
        ({"seeds": 0}, "at least 1"),
        ({"seeds": [1, 1]}, "without repeats"),
        ({"baseline": {"steps": 3}}, "no factor is called 'steps'"),
        ({"grid": {"steps": [3, 4]}, "baseline": {"steps": 5}}, "no level 5"),
        ({"variants": {"a": {"seed": 3}}}, "a sets the seed"),
        ({"quick": {"set": {"seed": 3}}}, "quick.set sets the seed"),
        ({"grid": {"steps": [3, 4]}, "contrasts": [[3, 5]]}, "two levels of one factor"),
        ({"grid": {"steps": [3, 4]}, "contrasts": [[3, 3]]}, "two levels of one factor"),
        ({"grid": {"steps": [3, 4], "batch_size": [3, 4]}, "contrasts": [[3, 4]]}, "of one only"),
        ({"grid": {"steps": [3, 4]}, "contrasts": [[3, 4], [4, 3]]}, "there twice"),
        ({"metrics": ["a/b", "a_b"]}, "'a/b' and 'a_b' would both be table_a_b; have the script call one of them"),
        ({"name": "a b"}, "name"),
        ({"grids": {}}, "no such field"),
    ],
)
def test_what_is_no_study(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        study(**fields)


def test_an_invalid_cell_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cell gradients=neither: .*gradients"):
        cells(study(grid={"gradients": ["shared", "neither"]}))


def test_a_script_s_command_is_filled_in() -> None:
    declared = Study(
        name="mine",
        script=("python", "train.py", "--lr={lr}", "--seed", "{seed}", "{out}"),
        grid={"lr": [0.1, 0.2]},
        seeds=1,
    )
    assert [cell.command for cell in cells(declared)] == [
        ("python", "train.py", "--lr=0.1", "--seed", "0", "{out}"),
        ("python", "train.py", "--lr=0.2", "--seed", "0", "{out}"),
    ]
    with pytest.raises(ConfigError, match=r"does not use \['lr'\]"):
        cells(declared.replace(script=("x", "{seed}", "{out}")))
    with pytest.raises(ConfigError, match=r"does not use \{out\}"):
        cells(declared.replace(script=("x", "{seed}", "{lr}")))
    with pytest.raises(ConfigError, match="its own affair"):
        declared.replace(budget=Budget(total=3))
    with pytest.raises(ConfigError, match=r"asks for \['typo'\], and there are \['lr', 'seed', 'out', 'python'\]"):
        cells(declared.replace(script=("x", "{seed}", "{lr}", "{out}", "{typo}")))
    for name in ("out", "python"):
        with pytest.raises(ConfigError, match=f"cannot be called \\['{name}'\\]"):
            declared.replace(grid={name: [1]})


def test_a_value_in_braces_is_not_filled_in_again() -> None:
    declared = Study(name="s", script=("x", "{out}", "{seed}", "{a}", "{b}", '{"k": 1}'), grid={"a": ["{b}"], "b": [1]})
    assert cells(declared)[0].command == ("x", "{out}", "0", "{b}", "1", '{"k": 1}')


def test_an_edited_script_is_another_cell(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    declared = Study(name="s", script=("{python}", str(script), "{seed}", "{out}"), seeds=1)
    keys = []
    for text in ("print(1)", "print(2)", "print(1)"):
        script.write_text(text)
        keys.append(cells(declared)[0].key)
    assert keys[0] != keys[1]
    assert keys[0] == keys[2]


def test_names_that_look_like_numbers_are_words(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        "base: {task: digits, steps: 10}\n"
        "grid: {batch_size: {1: 4, 2: 8}}\n"
        "variants: {1: {}, 2.5: {window: 5}, no: {window: 3}}\n"
        "contrasts: [[1, 2.5]]\n"
        "baseline: {variant: 1, batch_size: 2}\n"
        "seeds: 1\n"
    )
    declared = Study.load(tmp_path / "s.yaml")
    assert declared.factors["batch_size"] == {"1": 4, "2": 8}
    assert list(declared.factors["variant"]) == ["1", "2.5", "false"]
    assert declared.pairs == [("variant", "1", "2.5")]
    assert len(cells(declared)) == 6


def test_contrasts_find_the_factor_they_are_levels_of() -> None:
    declared = study(grid={"steps": [3, 4]}, variants={"a": {}, "b": {}}, contrasts=[["a", "b"], [4, 3]])
    assert declared.pairs == [("variant", "a", "b"), ("steps", "4", "3")]


def test_it_is_read_from_yaml_with_its_base_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("{task: digits, steps: 10}")
    (tmp_path / "widths.yaml").write_text("{base: run.yaml, grid: {task.width: [8, 16]}, seeds: 1}")
    declared = Study.load(tmp_path / "widths.yaml")
    assert declared.name == "widths"
    assert [c.config.task.width for c in cells(declared) if c.config] == [8, 16]  # type: ignore[attr-defined]
    (tmp_path / "bad.yaml").write_text("{base: run.yaml, seed: 1}")
    with pytest.raises(ConfigError, match=r"bad\.yaml.*seed"):
        Study.load(tmp_path / "bad.yaml")


def test_the_shipped_studies_are_valid() -> None:
    shipped = sorted((Path(__file__).parents[3] / "studies").glob("*.yaml"))
    assert len(shipped) >= 3
    for path in shipped:
        declared = Study.load(path)
        for quick in (False, True):
            found = cells(declared, quick=quick)
            assert all(isinstance(cell.config, RunConfig) or cell.command for cell in found), path


def test_every_row_of_the_shipped_table_trains() -> None:
    """As a dry run has it, in fewer and shorter windows: what sets replicas apart differs from row to row."""
    declared = Study.load(Path(__file__).parents[3] / "studies" / "table1.yaml")
    rows = {cell.key: cell.config for cell in cells(declared) if cell.config and cell.config.seed == 0}
    on_digits = [config for config in rows.values() if config.task.kind == "digits"]
    assert len(on_digits) >= 14
    for config in on_digits:
        seconds_per_step(RunConfig.from_dict({**config.to_dict(), "replicas": 2, "window": 3}))


def test_levels_are_named_after_their_values() -> None:
    assert [label(v) for v in (None, "a", 3, 1e-3, True, {"kind": "fixed", "steps": 5}, [1, 2])] == [
        "none", "a", "3", "0.001", "true", "fixed(steps=5)", "[1, 2]",
    ]  # fmt: skip


@pytest.mark.parametrize(("told", "read"), [(1.5, 1.5), (2, 2.0), (None, math.nan), ("1.5", None), (True, None)])
def test_a_cells_metric_is_a_number(told: object, read: float | None, tmp_path: Path) -> None:
    """What a script writes; a text or a truth value that could pass for a number is none."""
    (cell, *_), folder = cells(study(seeds=1)), StudyFolder(tmp_path)
    folder.cell(cell).mkdir(parents=True)
    (folder.cell(cell) / "result.json").write_text(json.dumps({"test_loss": told}))
    if read is None:
        with pytest.raises(HdetError, match="test_loss must be a number, or null where the run diverged; got"):
            folder.metric(cell, "test_loss")
    else:
        assert folder.metric(cell, "test_loss") == pytest.approx(read, nan_ok=True)
