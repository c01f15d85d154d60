"""`hdet find`: a learning rate for a declared run, before it is run."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_run import DIGITS, call

import hdet
from hdet.app.run import RunConfig
from hdet.document import dump, override, read

trials: Any = import_module("hdet.trials.find")  # the name itself is the function's
ALONE = {**DIGITS, "gradients": "shared", "steps": 300, "knobs": None}


def declared(folder: Path, **changes: object) -> Path:
    path = folder / "run.yaml"
    path.write_text(dump(RunConfig.from_dict({**ALONE, **changes})))
    return path


def test_the_lines_to_paste_declare_the_run_that_was_meant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = declared(tmp_path, optimizer={"lr": 1e-5})
    assert call("find", path, "--steps", 60, "--trials", 6, "--figure", tmp_path / "found.png") == 0
    said = capsys.readouterr().out
    table, _, rest = said.partition("\n\n")
    assert "6 trials of 10 steps, for a run of 300" in table
    lines = yaml.safe_load(rest[: rest.index("#") if "#" in rest else rest.index(str(tmp_path))])
    rate = lines["optimizer"]["lr"]
    assert rate > 1e-4
    assert RunConfig.from_dict(override(read(path), [f"optimizer.lr={rate}"])).optimizer.lr == rate
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["found.png", "run.yaml"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_figure_on_a_full_disk_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "found.pdf").symlink_to("/dev/full")
    path = declared(tmp_path)
    assert call("find", path, "--steps", 60, "--trials", 6, "--figure", tmp_path / "found.pdf") == 2
    assert "found.pdf cannot be written to: [Errno 28] No space left on device" in capsys.readouterr().err


def test_it_is_hdet_find_on_what_the_run_would_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run's batches, micro-batch by micro-batch, its schedule and its clipping."""
    path = declared(tmp_path, clip=0.5)
    assert call("find", path, "--set", "batch_size=4") == 0
    config = RunConfig.load(path, ["batch_size=4"])
    workload = config.task.build(seed=0, batch_size=4)
    model = workload.model()
    found = hdet.find(
        model,
        config.optimizer.build(workload.groups(model)),
        loss=workload.loss,
        batches=[workload.batch(step, replica) for step in range(6) for replica in range(4)],
        probe=hdet.Probe(workload.loss, workload.probe),
        total_steps=300,
        schedule=config.schedule,
        micro_batches=4,
        clip=0.5,
    )
    assert capsys.readouterr().out.startswith(f"{found}\n")


def test_a_run_that_holds_its_rate_is_tried_with_a_held_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a rise and a fall of their own, trials would end well at rates that ruin it."""
    shapes: list[Callable[[int], float]] = []

    def shape(*given: object) -> Callable[[int], float]:
        shapes.append(shape_of(*given))
        return shapes[-1]

    shape_of = trials._shape
    monkeypatch.setattr(trials, "_shape", shape)
    for changes in ({"schedule": None, "knobs": []}, {"schedule": None, "knobs": ["learning_rate"]}):
        assert call("find", declared(tmp_path, **changes)) == 0
        said = capsys.readouterr().out
        assert said.startswith("learning rate 0.001 -> ")
        assert "a peak of its own" not in said
    assert [list(map(shape, range(6))) for shape in shapes] == [[1.0] * 6] * 2


def test_a_peak_of_the_schedules_own_is_where_it_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = declared(tmp_path, schedule={"kind": "cosine", "peak": 0.02})
    assert call("find", path) == 0
    said = capsys.readouterr().out
    assert said.startswith("learning rate 0.02 -> ")
    assert "a peak of its own, 0.02: set that too" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--steps", 9), "9 steps in 5 trials leave fewer than 2 a trial"),
        (("--figure", "found.txt"), "figures are written as .pdf, .svg or .png"),
        (("--figure", "/dev/null/found.png"), "/dev/null/found.png cannot be written"),
        (("--set", "step=3"), "no such field"),
        (("--trials", 2), "greater than or equal to 3"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    arguments: tuple[object, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("find", declared(tmp_path), *arguments) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert told.err.count("\n") == 1
    assert told.out == "", "before the first trial"


def test_where_every_trial_diverges_nothing_is_offered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = tmp_path / "found.png"
    assert call("find", declared(tmp_path), "--set", "schedule.peak=1e30", "--figure", figure) == 1
    said = capsys.readouterr()
    assert said.err.startswith("error: all 5 trials diverged, at learning rates from")
    assert said.out == ""
    assert not figure.exists()
