"""Running a study: once each, continued after a kill, in shards, in processes, scripts too."""

import csv
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_workload import Tiny
from torch import Tensor

from hdet import files
from hdet.app.main import main
from hdet.app.run.config import RunConfig
from hdet.app.run.folder import RunFolder
from hdet.app.run.runner import NUMBERS
from hdet.app.study import Study, StudyFolder, cells
from hdet.app.study.runner import pending, run, turn
from hdet.app.study.timing import Timings, seconds_per_step
from hdet.errors import ConfigError, HdetError
from hdet.windows import FixedWindow

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


def test_the_file_of_a_run_is_no_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"task": "digits", "steps": 10}))
    with pytest.raises(SystemExit):
        main(["ablate", str(tmp_path / "run.yaml")])
    said = capsys.readouterr().err
    assert "run.yaml declares one run, which hdet run trains; a study names it: base: FILE\n" in said


def test_the_file_of_a_study_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY))
    with pytest.raises(ConfigError, match=r"study\.yaml declares a study, which hdet ablate runs"):
        RunConfig.load(tmp_path / "study.yaml")


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


def test_checkpoints_that_cells_set_out_from_are_made_and_a_dry_run_needs_none(ablate: Ablate, tmp_path: Path) -> None:
    start = {**STUDY["base"], "start": str(tmp_path / "starts" / "{task}-{seed}" / "model.pt")}
    run = {name: value for name, value in STUDY["base"].items() if name != "optimizer"}
    (tmp_path / "first-imported.yaml").write_text(yaml.safe_dump({**run, "steps": 8}))
    given = {"base": start, "prepare": {"run": "first-{task}.yaml", "seed": 100}}
    assert "2 checkpoints that they set out from are made first" in ablate("--dry-run", **given)
    assert not (tmp_path / "starts").exists()
    with pytest.raises(SystemExit):
        ablate(base=start)  # it does not say how they are made
    assert "making " in ablate(**given)
    made = tmp_path / "starts" / "imported-1"
    assert RunConfig.load(made / "config.yaml").seed == 101
    before = (made / "model.pt").read_bytes()
    for folder in (tmp_path / "out" / "cells").iterdir():
        assert RunFolder(folder).load_result() is not None
    assert "making " not in ablate(**given, grid={"optimizer.lr": [0.05, 0.1, 0.2]})
    assert (made / "model.pt").read_bytes() == before


@pytest.mark.parametrize("content", ["", "[]", '{"a": "long"}', '{"a": null}', "[" * 100_000])
def test_timings_that_cannot_be_read_are_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "timings.json").write_text(content)
    with pytest.raises(HdetError, match=r"timings\.json holds no timings .* remove it"):
        Timings(tmp_path / "timings.json", None)


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
    assert "0 of 2 (2 diverged)" in printed
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
    assert "0.1   2       0.6000" in table
    assert "0.2   0 of 2  -" in table
    assert "Incomplete: 2 of 4 cells have no test_loss yet." in table
    log = next(f for f in (tmp_path / "out" / "cells").iterdir() if not (f / "result.json").exists()) / "log.txt"
    assert "no luck" in log.read_text()
    (tmp_path / "out" / "cells" / "healed").touch()
    printed = ablate(**fields)
    assert "+0.1000" in printed
    assert "Incomplete" not in printed


@contextmanager
def started(tmp_path: Path, *options: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """`hdet ablate` on the study written last, in a process of its own."""
    command = [sys.executable, "-m", "hdet", "ablate", str(tmp_path / "study.yaml"), "--out", str(tmp_path / "out")]
    process = subprocess.Popen([*command, *options], env={**os.environ, **env}, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("jobs", "end"), [("1", signal.SIGINT), ("2", signal.SIGINT), ("2", signal.SIGTERM)])
@pytest.mark.usefixtures("made")
def test_an_interrupted_study_says_so_and_goes_on(
    ablate: Ablate, tmp_path: Path, jobs: str, end: signal.Signals
) -> None:
    fields: dict[str, Any] = {"base": {**STUDY["base"], "steps": 120}, "seeds": 1, "baseline": {}}
    ablate("--dry-run", **fields)
    cells_ = tmp_path / "out" / "cells"
    command = [sys.executable, "-m", "hdet", "ablate", str(tmp_path / "study.yaml"), "--out", str(tmp_path / "out")]
    study = subprocess.Popen(
        [*command, "--jobs", jobs],
        env={**os.environ, "HDET_TEST_NAP": "0.5"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # pytest may be in the background
    )
    until(lambda: len(list(cells_.glob("*/checkpoint.pt"))) == int(jobs), seconds=60)
    if end == signal.SIGINT:
        os.killpg(study.pid, end)  # as a terminal does
    else:
        study.send_signal(end)
    word, code = {signal.SIGINT: ("interrupted", 130), signal.SIGTERM: ("terminated", 143)}[end]
    assert study.communicate(timeout=120)[1] == f"{word}; the same command goes on\n"
    assert study.returncode == code
    assert all(free(cell) for cell in cells_.iterdir())
    assert "still to run" not in ablate(**fields)


def until(true: Callable[[], bool], seconds: float = 300.0) -> None:
    """Wait for something that other processes do."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def free(folder: Path) -> bool:
    """Whether no process is at a cell."""
    with turn(folder) as lock:
        return lock is not None


@pytest.mark.timeout(600)  # seconds, but several starts of Python and torch on a machine that may be busy
def test_workers_end_with_a_killed_study_and_two_studies_do_not_meet_in_a_cell(
    ablate: Ablate, made: Callable[[], int], tmp_path: Path
) -> None:
    fields: dict[str, Any] = {"base": {**STUDY["base"], "steps": 120}, "seeds": 1, "baseline": {}}
    ablate("--dry-run", **fields)
    begun = made()
    cells_ = tmp_path / "out" / "cells"
    with started(tmp_path, "--jobs", "2", HDET_TEST_NAP="0.5") as study:
        until(lambda: len(list(cells_.glob("*/checkpoint.pt"))) == 2)
        printed = ablate(**fields)
        assert printed.count("running elsewhere, in another process") == 2
        assert "2 cells are still to run" in printed
        study.send_signal(signal.SIGKILL)
        study.wait()
    until(lambda: all(free(cell) for cell in cells_.iterdir()), seconds=60)  # two minutes lay before them
    assert not list(cells_.glob("*/result.json"))
    before = {f: f.read_text().splitlines() for f in cells_.glob("*/history.jsonl")}
    assert "still to run" not in ablate(**fields)
    assert made() == begun + 4
    for history, lines in before.items():
        windows = [json.loads(line)["window"] for line in history.read_text().splitlines()]
        assert windows == list(range(30))
        assert history.read_text().splitlines()[: len(lines) - 1] == lines[:-1]  # resumed, not started again
    table = (tmp_path / "out" / "table_test_loss.csv").read_text()
    (tmp_path / "out").rename(tmp_path / "other")
    ablate(**fields)
    assert (tmp_path / "out" / "table_test_loss.csv").read_text() == table


@pytest.mark.timeout(600)
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_script_whose_study_is_killed_ends_too_or_goes_on_holding_its_cell(
    scripted: Callable[..., str], tmp_path: Path, jobs: str
) -> None:
    pids = tmp_path / "pids"
    body = f"""
with open({str(pids)!r}, "a") as file:
    file.write(f"{{os.getpid()}}\\n")
time.sleep(float(os.environ.get("HDET_TEST_NAP", "0")))
(out / "result.json").write_text(json.dumps({{"test_loss": 1.0}}))
"""
    fields: dict[str, Any] = {"seeds": 1, "grid": {"rate": [0.1]}}
    scripted(body, "--dry-run", **fields)
    with started(tmp_path, "--jobs", jobs, HDET_TEST_NAP="600") as study:
        until(lambda: pids.exists() and pids.read_text().endswith("\n"))
        study.send_signal(signal.SIGKILL)
        study.wait()
    (cell,) = (tmp_path / "out" / "cells").iterdir()
    if jobs == "1":  # nothing is left of the study that could end it
        assert "running elsewhere" in scripted(body, **fields)
        os.kill(int(pids.read_text()), signal.SIGKILL)
    until(lambda: free(cell), seconds=60)
    assert "still to run" not in scripted(body, **fields)


SECONDS = {"budget": {"hold": "seconds", "total": 0.2}, "seeds": 1, "metrics": ["test_loss"]}


def test_wall_time_is_held_by_timing_once(tmp_path: Path, ablate: Ablate) -> None:
    timings = tmp_path / "out" / "timings.json"
    printed = ablate(**SECONDS)
    kept = json.loads(timings.read_text())
    assert len(kept) == 2
    assert all(0 < seconds < 0.1 for seconds in kept.values())
    header = (tmp_path / "out" / "table_test_loss.txt").read_text().splitlines()[0]
    assert header.split()[:4] == ["optimizer.lr", "seeds", "test_loss", "seconds"]
    assert "the seconds are those the runs then took" in printed
    ablate(**SECONDS)
    assert json.loads(timings.read_text()) == kept
    assert len(list((tmp_path / "out" / "cells").iterdir())) == 2


def test_shards_do_not_time_for_themselves(tmp_path: Path, ablate: Ablate, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        ablate("--shard", "1/2", **SECONDS)
    assert ended.value.code == 2
    assert "time all of them once with --dry-run" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    ablate("--dry-run", **SECONDS)
    kept = (tmp_path / "out" / "timings.json").read_text()
    ablate("--shard", "1/2", **SECONDS)
    assert "still to run" not in ablate("--shard", "2/2", **SECONDS)
    assert (tmp_path / "out" / "timings.json").read_text() == kept


def test_a_step_is_timed_without_the_first_calls_and_with_its_share_of_a_window_s_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a clock that only batches and checkpoints move."""
    now, calls = [0.0], []

    def batch(self: Tiny, step: int, replica: int) -> Tensor:
        calls.append(torch.get_num_threads())
        now[0] += 5.0 if len(calls) <= 2 else 0.004
        return torch.ones(self.batch_size, 3)

    def save(self: RunFolder, state: dict[str, Any]) -> None:
        now[0] += 0.04

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr("tiny_workload.Tiny.batch", batch)
    monkeypatch.setattr(RunFolder, "save_checkpoint", save)
    config = RunConfig.from_dict({**STUDY["base"], "steps": 100, "window": 10})
    assert seconds_per_step(config) == pytest.approx(0.008 + 0.04 / 10)
    assert seconds_per_step(config.replace(window=FixedWindow(100))) == pytest.approx(0.008 + 0.04 / 100)
    calls.clear()
    few = config.replace(steps=2, window=FixedWindow(1))
    assert seconds_per_step(few) == pytest.approx(0.048)  # of two windows the first is thrown away too
    threads = torch.get_num_threads()
    seconds_per_step(config, threads=threads + 1)
    assert calls[-1] == threads + 1
    assert torch.get_num_threads() == threads


def test_a_run_with_a_long_warm_up_is_timed(recwarn: pytest.WarningsRecorder) -> None:
    """Longer than the pilot, whose few steps are nobody's declaration."""
    base = {**STUDY["base"], "steps": 500, "batch_size": 16, "signal": "probe"}
    task = {"kind": "digits", "width": 8, "depth": 1}
    recommended = {**base, "task": task, "knobs": "recommended", "window": "growing", "warmup_steps": 150}
    assert seconds_per_step(RunConfig.from_dict(recommended)) > 0.0
    assert not recwarn.list


def test_what_several_shards_write_is_moved_into_place(
    ablate: Ablate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = []

    def renamed(part: Path, path: Path) -> None:
        moved.append(path.name)
        rename(part, path)

    rename = files.renamed
    monkeypatch.setattr(files, "renamed", renamed)
    ablate(seeds=1)
    left = {path.name for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert {"study.yaml", "cells.csv", "table_test_loss.txt", "curves.png"} < left <= set(moved)


def test_what_samples_leave_out_is_said(ablate: Ablate, tmp_path: Path) -> None:
    fields = {"grid": {"replicas": [2, 3]}, "baseline": {}, "seeds": 1, "budget": {"hold": "samples", "total": 100}}
    for printed in (ablate("--dry-run", **fields), ablate(**fields)):
        assert "Those that only probes and counterfactual evidence evaluate are not counted" in printed
        assert "Steps are whole: of 100 the cells spend 96 to 96." in printed
    assert "spend 96 to 96" in (tmp_path / "out" / "table_test_loss.md").read_text()


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_metric_that_no_run_ends_with_is_refused_before_any_cell_runs(
    ablate: Ablate, capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        ablate(*options, metrics=["test_loss", "accuracy"])
    assert ended.value.code == 2
    assert "metrics: a run does not end with ['accuracy']; there are ['test_loss'," in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_every_number_that_a_run_ends_with_is_a_metric(ablate: Ablate, tmp_path: Path) -> None:
    ablate(seeds=1, grid={}, baseline={}, metrics=list(NUMBERS))
    (result,) = (tmp_path / "out" / "cells").glob("*/result.json")
    ended = json.loads(result.read_text())
    assert ended.pop("comparing") is False
    assert set(NUMBERS) == {name for name, value in ended.items() if isinstance(value, int | float)}


def test_any_error_is_contained_in_its_cell(ablate: Ablate, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for jobs in ("1", "2"):
        with pytest.raises(SystemExit) as ended:
            ablate("--jobs", jobs, grid={"task.options.boom": [True, False]}, baseline={})
        assert ended.value.code == 1
        printed = capsys.readouterr().out
        assert printed.count("failed: RuntimeError: CUDA out of memory; see ") == 2
        table = (tmp_path / "out" / "table_test_loss.txt").read_text().splitlines()
        assert table[2].split()[:4] == ["true", "0", "of", "2"]
        assert table[3].split()[:2] == ["false", "2"]
        left = list((tmp_path / "out" / "cells").glob("*/error.txt"))
        assert len(left) == 2
        assert "Traceback" in left[0].read_text()


@pytest.fixture
def scripted(ablate: Ablate, tmp_path: Path) -> Callable[..., str]:
    """A study of a script over rates .1 and .2, two seeds; the body sees `rate`, `seed` and `out`."""

    def call(body: str, *options: str, **fields: Any) -> str:
        script = tmp_path / "train.py"
        head = "import json, os, pathlib, sys, time\n"
        script.write_text(
            head + "rate, seed, out = float(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])\n" + body
        )
        study = {
            "base": None,
            "script": ["{python}", str(script), "{rate}", "{seed}", "{out}"],
            "grid": {"rate": [0.1, 0.2]},
            "baseline": {},
            "metrics": ["test_loss"],
            "quick": {},
        }
        return ablate(*options, **{**study, **fields})

    return call


def test_a_result_that_cannot_be_read_stops_no_other(
    scripted: Callable[..., str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for written, message in (
        ("{'other': 1}", "has no 'test_loss'; it has ['other']"),
        ("{'test_loss': 'n/a'}", "'n/a'"),
    ):
        with pytest.raises(SystemExit) as ended:
            scripted(f"(out / 'result.json').write_text(json.dumps({written} if rate == .2 else {{'test_loss': 1.0}}))")
        assert ended.value.code == 1
        told = capsys.readouterr()
        assert message in told.out
        assert message in told.err
        table = (tmp_path / "out" / "table_test_loss.txt").read_text().splitlines()
        assert table[2].split()[:3] == ["0.1", "2", "1.0000"]
        assert table[3].split()[:4] == ["0.2", "0", "of", "2"]


def test_a_script_that_fails_is_not_finished_by_its_result(scripted: Callable[..., str], tmp_path: Path) -> None:
    code = "sys.exit(3 if rate == .2 else 0)"
    for written in ('{"test_loss": 1}', '{"test_l'):
        with pytest.raises(SystemExit):
            scripted(f"(out / 'result.json').write_text('{written}' if rate == .2 else '{{\"test_loss\": 2}}')\n{code}")
        table = (tmp_path / "out" / "table_test_loss.txt").read_text().splitlines()
        assert table[3].split()[:4] == ["0.2", "0", "of", "2"]
    assert [f.read_text() for f in (tmp_path / "out" / "cells").glob("*/result.failed.json")].count('{"test_l') == 2
    with pytest.raises(SystemExit):  # and a torn one is none, whatever the script says
        scripted("(out / 'result.json').write_text('{\"test_l' if rate == .2 else '{\"test_loss\": 2}')")
    assert "0 of 2" in (tmp_path / "out" / "table_test_loss.txt").read_text()
    results = [f.parent for f in (tmp_path / "out" / "cells").glob("*/result.json")]
    assert {
        (f / "result.json").read_text() == '{"test_loss": 2}' for f in results if (f / "finished.json").exists()
    } == {True}


def test_a_killed_script_starts_again_in_an_empty_folder(scripted: Callable[..., str], tmp_path: Path) -> None:
    """As docs/ablations.md has it: the engine's history lies in {out}, and would refuse a second run."""
    body = """
from hdet.history import History, WindowRecord
history = History(out / "history.jsonl")
for window in range(3):
    history.expect(window)
    history.append(WindowRecord(window, window, window + 1, {}, {}, [1.0], {}, {}, True))
    if window == 1 and rate == 0.2 and not (out.parent.parent / "healed").exists():
        (out / "checkpoints").mkdir()
        os.kill(os.getpid(), 9)
(out / "result.json").write_text(json.dumps({"test_loss": 1.0}))
"""
    with pytest.raises(SystemExit):
        scripted(body, seeds=1)
    (tmp_path / "out" / "healed").touch()
    assert "still to run" not in scripted(body, seeds=1)
    assert not list((tmp_path / "out" / "cells").glob("*/checkpoints"))
    assert {len(f.read_text().splitlines()) for f in (tmp_path / "out" / "cells").glob("*/history.jsonl")} == {3}


def test_the_cost_of_scripts_is_what_finished_ones_took(scripted: Callable[..., str], tmp_path: Path) -> None:
    body = "time.sleep(0.3)\n(out / 'result.json').write_text('{\"test_loss\": 1}')"
    assert "4 to run: for how long is unknown until one is finished" in scripted(body, "--dry-run")
    scripted(body, "--shard", "1/4")
    lines = list(csv.DictReader((tmp_path / "out" / "cells.csv").read_text().splitlines()))
    assert [0.3 <= float(line["seconds"]) < 30 for line in lines] == [True]
    finished = next((tmp_path / "out" / "cells").glob("*/finished.json"))
    finished.write_text('{"seconds": 600}')
    assert "3 to run: about 15.0 minutes with --jobs 2" in scripted(body, "--dry-run", "--jobs", "2")


def test_a_metric_may_be_called_anything(scripted: Callable[..., str], tmp_path: Path) -> None:
    """As loggers do; a file's name has no slash."""
    body = "(out / 'result.json').write_text(json.dumps({'val/loss': rate}))"
    fields = {"metrics": ["val/loss"], "contrasts": [[0.1, 0.2]]}
    assert "0.1 - 0.2" in scripted(body, **fields)
    for name in ("table_val_loss.txt", "table_val_loss.tex", "contrasts_val_loss.csv", "val_loss_by_rate.png"):
        assert (tmp_path / "out" / name).stat().st_size > 50
    assert "val/loss" in (tmp_path / "out" / "cells.csv").read_text().splitlines()[0]


@pytest.mark.parametrize("fields", [{}, SECONDS], ids=["steps", "seconds"])
@pytest.mark.parametrize("parts", ["a file", "a file/below", "/proc/no/folder"])
def test_a_folder_that_cannot_be_made_is_one_line(
    fields: dict[str, Any], parts: str, ablate: Ablate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a file").write_text("mine")
    out = tmp_path / parts
    with pytest.raises(SystemExit) as ended:
        ablate("--out", str(out), **fields)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert f"{out} cannot be a study's folder: [Errno" in said
    assert said.endswith("; choose another --out\n")
    assert said.count("\n") == 1


def test_a_full_disk_is_told_in_lines_and_ends_no_other_cell(
    ablate: Ablate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full() -> str:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, before[1]))
        try:
            with pytest.raises(SystemExit) as ended:
                ablate("--out", str(tmp_path / "full"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert ended.value.code == 1
        return capsys.readouterr().err

    assert "4 cells failed" in full()
    ablate("--out", str(tmp_path / "full"))
    (tmp_path / "full" / "curves.png").unlink()
    assert "make room, and the same command writes them" in full()
    ablate("--out", str(tmp_path / "full"))
    assert (tmp_path / "full" / "curves.png").exists()
    (tmp_path / "full" / "cells.csv").unlink()
    (tmp_path / "full" / "cells.csv").mkdir()
    with pytest.raises(SystemExit):
        ablate("--out", str(tmp_path / "full"))
    assert re.search(r"the tables in .* could not be written .*; mend that", capsys.readouterr().err)


def test_without_posix_locks_a_study_is_planned_and_not_run(
    ablate: Ablate, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    assert "4 to run" in ablate("--dry-run")
    with pytest.raises(SystemExit) as ended:
        ablate()
    assert ended.value.code == 2
    assert "studies lock their cells by flock, which only POSIX systems have" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    declared = Study.from_dict(STUDY)
    with pytest.raises(ConfigError, match=r"run this one there, or each of its runs by hdet run$"):
        list(run(StudyFolder(tmp_path / "out"), cells(declared)))


def test_contrasts_are_what_is_tested(ablate: Ablate, tmp_path: Path) -> None:
    printed = ablate(contrasts=[[0.05, 0.1]], metrics=["test_loss"])
    assert "0.05 - 0.1" in printed
    assert "the 1 named contrast." in printed
    (line,) = csv.DictReader((tmp_path / "out" / "contrasts_test_loss.csv").read_text().splitlines())
    assert (line["first"], line["second"], line["pairs"]) == ("0.05", "0.1", "2")


def test_another_version_s_folder_is_pointed_out(ablate: Ablate, tmp_path: Path) -> None:
    assert "was begun by" not in ablate("--shard", "1/4")
    (tmp_path / "out" / "version.txt").write_text("0.0.1")
    assert "was begun by hdet 0.0.1, and this is" in ablate("--shard", "1/4")


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
