"""Running a study: once each, continued after a kill, in shards, in processes, scripts too."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hdet.cli import main
from hdet.errors import ConfigError
from hdet.running.config import RunConfig
from hdet.running.folder import RunFolder
from hdet.study import Study, StudyFolder, cells
from hdet.study.runner import pending, run, seconds_per_step

STUDY: dict[str, Any] = {
    "name": "tiny",
    "base": {
        "task": {"kind": "imported", "path": "tiny_workload:make"},
        "steps": 12,
        "replicas": 2,
        "batch_size": 4,
        "window": 4,
        "signal": "training_loss",
        "knobs": [],
        "optimizer": {"lr": 0.1},
    },
    "grid": {"optimizer.lr": [0.05, 0.1]},
    "seeds": 2,
    "baseline": {"optimizer.lr": 0.1},
    "metrics": ["test_loss", "train_loss"],
    "quick": {"seeds": 1, "set": {"steps": 4}},
}

Ablate = Callable[..., str]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many workloads were made so far, in all processes."""
    monkeypatch.setenv("HDET_TEST_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))

    def count() -> int:
        path = tmp_path / "calls"
        return len(path.read_text().splitlines()) if path.exists() else 0

    return count


@pytest.fixture
def ablate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Ablate:
    """`hdet ablate` on a study; returns what it printed, and raises its exit code."""

    def call(*options: str, **fields: Any) -> str:
        (tmp_path / "study.yaml").write_text(yaml.safe_dump({**STUDY, **fields}))
        capsys.readouterr()
        try:
            main(["ablate", str(tmp_path / "study.yaml"), "--out", str(tmp_path / "out"), *options])
        except SystemExit as ended:
            if ended.code:
                raise
        return capsys.readouterr().out

    return call


def test_a_study_leaves_runs_tables_and_pictures(ablate: Ablate, tmp_path: Path) -> None:
    printed = ablate()
    out = tmp_path / "out"
    assert "baseline" in printed
    for metric in ("test_loss", "train_loss"):
        for ending in ("txt", "csv", "md", "tex"):
            assert (out / f"table_{metric}.{ending}").stat().st_size > 50
        assert (out / f"{metric}_by_optimizer_lr.png").stat().st_size > 5000
    assert (out / "curves.png").stat().st_size > 5000
    assert len((out / "cells.csv").read_text().splitlines()) == 5
    assert Study.load(out / "study.yaml").name == "tiny"
    folders = list((out / "cells").iterdir())
    assert len(folders) == 4
    for folder in folders:  # every cell is an ordinary run folder
        kept = RunFolder(folder)
        assert RunConfig.load(kept.config).steps == 12
        assert kept.load_result()["test_loss"] > 0  # type: ignore[index]
        assert kept.history.exists()
        assert kept.model.exists()


def test_a_dry_run_prints_cells_and_cost_and_leaves_no_trace(ablate: Ablate, tmp_path: Path) -> None:
    printed = ablate("--dry-run")
    assert "optimizer.lr=0.05  seed=1  12 steps  96 samples" in printed
    assert "4 cells, 4 different runs, 4 to run: about" in printed
    assert not (tmp_path / "out").exists()
    ablate()
    printed = ablate("--dry-run")
    assert "(finished)" in printed
    assert "0 to run: about 0.0 minutes" in printed


def test_a_finished_cell_is_never_run_again(ablate: Ablate, made: Callable[[], int]) -> None:
    ablate()
    assert made() == 4
    assert "4 cells are finished already" in ablate()
    assert made() == 4
    ablate(grid={"optimizer.lr": [0.05, 0.1, 0.2]})
    assert made() == 6


def test_a_killed_study_goes_on_where_it_was(
    ablate: Ablate, made: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):  # the second level's first cell is interrupted at step 9, in its third window
        ablate(grid={"task.options.crash": [None, 9]}, baseline={}, seeds=1)
    assert made() == 2
    (half,) = [f for f in (tmp_path / "out" / "cells").iterdir() if not (f / "result.json").exists()]
    before = (half / "history.jsonl").read_text().splitlines()
    assert len(before) == 2
    monkeypatch.setenv("HDET_TEST_HEALED", "1")
    ablate(grid={"task.options.crash": [None, 9]}, baseline={}, seeds=1)
    assert made() == 3
    after = (half / "history.jsonl").read_text().splitlines()
    assert after[:2] == before  # resumed, not started again
    losses = [json.loads((f / "result.json").read_text())["test_loss"] for f in (tmp_path / "out" / "cells").iterdir()]
    assert losses[0] == losses[1]


def test_shards_share_the_work(ablate: Ablate, made: Callable[[], int]) -> None:
    assert "2 cells are still to run" in ablate("--shard", "1/2")
    assert made() == 2
    assert "still to run" not in ablate("--shard", "2/2")
    assert made() == 4


def test_jobs_run_in_processes_and_give_the_same(ablate: Ablate, made: Callable[[], int], tmp_path: Path) -> None:
    ablate("--jobs", "2")
    assert made() == 4
    parallel = (tmp_path / "out" / "table_test_loss.csv").read_text()
    (tmp_path / "out").rename(tmp_path / "other")
    ablate()
    assert (tmp_path / "out" / "table_test_loss.csv").read_text() == parallel


def test_quick_is_a_smaller_study(ablate: Ablate, tmp_path: Path) -> None:
    ablate("--quick")
    results = [json.loads((f / "result.json").read_text()) for f in (tmp_path / "out" / "cells").iterdir()]
    assert [result["steps"] for result in results] == [4, 4]
    assert Study.load(tmp_path / "out" / "study.yaml").name == "tiny-quick"


def test_a_cell_that_diverges_is_a_result(ablate: Ablate, made: Callable[[], int]) -> None:
    fields = {"grid": {"task.options.fail": [False, True]}, "baseline": {"task.options.fail": False}}
    base = {**STUDY["base"], "steps": 40}
    printed = ablate(**fields, base=base)
    assert "0 (+2 diverged)" in printed
    calls = made()
    ablate(**fields, base=base)
    assert made() == calls


def test_an_error_ends_only_its_own_cell_and_is_tried_again(ablate: Ablate, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import json, pathlib, sys\n"
        "rate, seed, out = float(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])\n"
        "if rate == 0.2 and not (out.parent / 'healed').exists():\n"
        "    raise SystemExit('no luck')\n"
        "(out / 'result.json').write_text(json.dumps({'test_loss': rate + seed}))\n"
    )
    fields = {
        "base": None,
        "script": [sys.executable, str(script), "{rate}", "{seed}", "{out}"],
        "grid": {"rate": [0.1, 0.2]},
        "baseline": {"rate": 0.1},
        "metrics": ["test_loss"],
        "quick": {},
    }
    with pytest.raises(SystemExit) as ended:
        ablate(**fields)
    assert ended.value.code == 1
    table = (tmp_path / "out" / "table_test_loss.txt").read_text()
    assert "0.1   2      0.6000" in table
    log = next(f for f in (tmp_path / "out" / "cells").iterdir() if not (f / "result.json").exists()) / "log.txt"
    assert "no luck" in log.read_text()
    (tmp_path / "out" / "cells" / "healed").touch()
    printed = ablate(**fields)
    assert "+0.1000" in printed


def test_wall_time_is_held_by_timing_once(tmp_path: Path, made: Callable[[], int], ablate: Ablate) -> None:
    seconds = seconds_per_step(RunConfig.from_dict(STUDY["base"]))
    assert 0 < seconds < 1
    ablate(budget={"hold": "seconds", "total": 20 * seconds}, seeds=1)
    kept = json.loads((tmp_path / "out" / "timings.json").read_text())
    assert len(kept) == 2
    ablate(budget={"hold": "seconds", "total": 20 * seconds}, seeds=1)
    assert json.loads((tmp_path / "out" / "timings.json").read_text()) == kept
    assert len(list((tmp_path / "out" / "cells").iterdir())) == 2


def test_a_metric_that_is_not_there_is_named(ablate: Ablate, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ablate(metrics=["accuracy"])
    assert "no 'accuracy'; it has" in capsys.readouterr().err


def test_the_runner_in_python(tmp_path: Path) -> None:
    declared = Study.from_dict(STUDY)
    folder, everything = StudyFolder(tmp_path / "out"), cells(declared)
    folder.begin(declared)
    assert len(pending(folder, everything)) == 4
    assert [error for _, error in run(folder, everything)] == [None] * 4
    groups = folder.groups(everything, "test_loss")
    assert {seed for values in groups.values() for seed in values} == {0, 1}


def test_jobs_must_be_some(ablate: Ablate) -> None:
    with pytest.raises(SystemExit) as ended:
        ablate("--jobs", "0")
    assert ended.value.code == 2
    with pytest.raises((SystemExit, ConfigError)):
        ablate("--shard", "3/2")
