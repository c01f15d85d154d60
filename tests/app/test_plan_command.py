"""`hdet plan`: what a run would do, told before it is run."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import DIGITS, call

import hdet
from hdet.app.planning.identifiable import Need, by_noise, by_pilot
from hdet.app.planning.picture import BARS, line, plan_figure, ruler
from hdet.app.run import Run, RunConfig
from hdet.app.run.loop import Training
from hdet.document import dump
from hdet.engine.preview import PlannedKnob, Preview, preview
from hdet.errors import ConfigError, StepError
from hdet.record import WindowRecord


@pytest.fixture
def declared(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(dump(RunConfig.from_dict(DIGITS)))
    return path


def training(**changes: Any) -> Training:
    config = RunConfig.from_dict({**DIGITS, **changes})
    return Training(config, config.task.build(seed=config.seed, batch_size=config.batch_size, device="cpu"))


def test_the_preview_is_what_the_run_then_does(tmp_path: Path) -> None:
    """Windows, and of a knob that is not moved bases and levels, to the last bit."""
    seen = preview(training().engine)
    run = Run(RunConfig.from_dict(DIGITS), tmp_path / "run")
    run()
    history = run.training.engine.history
    assert seen.windows == [(record.start, record.stop) for record in history]
    dropout = seen.knobs["dropout"]
    at = {step: (low, base, high) for step, low, base, high in zip(*vars_of(dropout), strict=True)}
    for record in history:
        values = record.values["dropout"]
        assert at[record.stop - 1] == (min(values), record.bases["dropout"], max(values))
    assert len(set(dropout.low)) == 1 < len(set(seen.knobs["learning_rate"].bases))


def test_a_terminal_without_blocks_or_letters_gets_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "b\N{LATIN SMALL LETTER E WITH CARON}h.yaml"
    path.write_text(dump(RunConfig.from_dict(DIGITS)))
    environment = {**os.environ, "PYTHONIOENCODING": "cp1252", "PYTHONPATH": str(Path(hdet.__file__).parents[1])}
    command = [sys.executable, "-m", "hdet", "plan", str(path)]
    planned = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=120)
    said = planned.stdout.decode("cp1252")
    assert (planned.returncode, planned.stderr) == (0, b"")
    assert "b\\u011bh.yaml: 24 steps" in said
    assert re.search(r"^  [_.:=+*#-]{24}$", said, re.MULTILINE)


def vars_of(knob: Any) -> tuple[list[Any], ...]:
    return knob.steps, knob.low, knob.bases, knob.high


def test_a_preview_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    looked_at, other = (
        Run(RunConfig.from_dict(DIGITS), tmp_path / "a"),
        Run(RunConfig.from_dict(DIGITS), tmp_path / "b"),
    )
    preview(looked_at.training.engine)
    assert looked_at().test_loss == other().test_loss
    with pytest.raises(StepError, match="a preview is of a run that has not begun; this one has made 24 steps"):
        preview(other.training.engine)


@pytest.mark.parametrize(
    "knob",
    [
        hdet.LearningRate(evidence=hdet.evidence.Population(), spread=hdet.spreads.Symmetric(0.5)),
        hdet.Dropout(evidence=hdet.evidence.Contrast(horizon=20), spread=hdet.spreads.TwoLevel(0.05)),
    ],
    ids=["population", "contrast"],
)
def test_a_preview_leaves_nothing_with_evidence_that_remembers(knob: hdet.Knob) -> None:
    """A population notes each window that opens; a dropout at 0 comes to be compared in the first windows only."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.0), torch.nn.Linear(4, 1))
    replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=4)
    probe = hdet.Probe(lambda model, batch: model(batch).square().mean(), list(torch.randn(2, 8, 2)))
    by_member = isinstance(knob, hdet.LearningRate)
    options: dict[str, Any] = {"gradients": "local", "merge": hdet.merges.Exploit()} if by_member else {}
    engine = hdet.Engine(replicas, [knob], window=5, total_steps=40, signal=probe, **options)
    before = engine.state_dict()["collectors"]
    preview(engine)
    assert engine.state_dict()["collectors"] == before


def test_a_run_without_an_end_cannot_be_previewed() -> None:
    model = torch.nn.Linear(2, 1)
    replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=2)
    with pytest.raises(ConfigError, match="a run without an end cannot be previewed"):
        preview(hdet.Engine(replicas, [hdet.LearningRate()]))


def test_what_evidence_without_replicas_compares_is_drawn_too() -> None:
    knobs = [{"kind": "learning_rate", "evidence": {"kind": "line", "width": 0.5}}]
    rate = preview(training(knobs=knobs, gradients="shared").engine).knobs["learning_rate"]
    for base, low, high in zip(rate.bases, rate.low, rate.high, strict=True):
        assert (low, high) == pytest.approx((base * math.exp(-0.5), base * math.exp(0.5)))


def test_the_command_draws_it_without_training(declared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = declared.parent / "pictures" / "plan.png"
    declared.write_text(dump(RunConfig.from_dict({**DIGITS, "merge": "outer"})))
    assert call("plan", declared, "--figure", picture) == 0, "its folder is made"
    said = capsys.readouterr().out
    assert "24 steps in 4 windows of 6 to 6 steps, 4 replicas" in said
    assert re.search("weights: .* in each of 4 models that come apart\nthe outer optimizer's state: ", said)
    assert "not measured" in said
    assert "▁" in said
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in declared.parent.iterdir()) == ["pictures", "run.yaml"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_figure_on_a_full_disk_is_one_line(declared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (declared.parent / "plan.pdf").symlink_to("/dev/full")
    assert call("plan", declared, "--figure", declared.parent / "plan.pdf") == 2
    assert "plan.pdf cannot be written to: [Errno 28] No space left on device" in capsys.readouterr().err


def test_of_a_search_in_which_nothing_diverges_every_byte_is_told(
    declared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    knobs = [{"kind": "learning_rate", "evidence": "line"}, "outer_learning_rate"]
    alike = {**DIGITS, "gradients": "shared", "merge": "outer", "knobs": knobs}
    declared.write_text(dump(RunConfig.from_dict(alike)))
    assert call("plan", declared) == 0
    said = capsys.readouterr().out
    assert "P, the parameters that are trained" in said
    assert "the weights a window opened with" in said
    assert "the outer step, tried" in said
    assert "moved:" in said


def test_a_pilot_measures_cost_and_noise(declared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("plan", declared, "--pilot", 2) == 0
    said = capsys.readouterr().out
    assert "time, by a pilot of 2 windows: about" in said
    assert "memory: " in said
    assert all(knob in said.split("can be moved")[1] for knob in ("learning_rate", "dropout"))


def test_given_noise_tells_how_many_windows_a_knob_needs(declared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("plan", declared, "--noise", "dropout=0.005", "--noise", "learning_rate=1", "--effect", 0.01) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "1 window of 4" in said
    assert "cannot be identified" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--noise", "drop=0.1"], "did you mean 'dropout'?"),
        (["--noise", "dropout"], "such as dropout=0.02"),
        (["--noise", "dropout=-1"], "such as dropout=0.02"),
        (["--noise", "dropout=1e180"], "up to 1e+09"),
        (["--noise", "dropout=1", "--effect", "inf"], "Invalid value for '--effect'"),
        (["--set", "steps=1000000000000", "--set", "schedule=null"], "more than 100000 windows, too many to be"),
        (["--pilot", 9], "the run has 4 windows"),
        (["--pilot", 2, "--noise", "dropout=0.1"], "say one of them"),
        (["--figure", "plan.gif"], ".pdf, .svg or .png"),
        (["--figure", "/dev/null/plan.png"], "/dev/null/plan.png cannot be written"),
        (["--set", "batch_sise=8"], "did you mean 'batch_size'?"),
    ],
)
def test_what_cannot_be_is_one_line(
    declared: Path, capsys: pytest.CaptureFixture[str], arguments: list[object], said: str
) -> None:
    assert call("plan", declared, *arguments) == 2
    told = capsys.readouterr()
    assert told.err.count("\n") == 1
    assert said in told.err
    assert told.out == "", "before the plan"


def windows(slope: float, stderr: float) -> list[WindowRecord]:
    told = {"slope": slope, "stderr": stderr, "level": None}
    return [WindowRecord(w, w, w + 1, {"rate": 1.0}, {}, [1.0], {"rate": told}, {}, False) for w in range(4)]


def test_needs_follow_from_noise() -> None:
    """Twice the noise takes four times the windows; a pilot and its noise given by hand agree."""
    assert by_noise("rate", 0.04, 0.01, 10).windows == 4 * by_noise("rate", 0.02, 0.01, 10).windows
    assert by_pilot("rate", windows(0.01, 0.04), 10).windows == pytest.approx(by_noise("rate", 0.04, 0.01, 10).windows)
    assert by_pilot("rate", windows(-0.5, 0.1), 10).words == "1 window of 10"
    assert by_pilot("rate", windows(0.0, 0.1), 10).words.startswith("cannot be identified: its slope is 0")
    assert "not measured" in by_pilot("rate", windows(0.1, math.nan), 10).words


def test_a_probe_that_is_said_to_be_large_enough_is() -> None:
    told = [re.findall("take (.*) times", Need("rate", need, 30).words)[0] for need in (31, 37.4, 60, 5000)]
    assert told == ["1.1", "1.3", "2", "166.7"]


def test_a_column_of_a_plan_is_the_same_steps_in_each_line() -> None:
    """Of steps that lie close together in short windows, and of a run shorter than a line."""
    steps = [*range(30), *range(30, 90, 10), 89]
    knob = PlannedKnob("rate", "line", "hold", steps, [1.0 - abs(step - 45) / 45 for step in steps], [], [])
    assert line(knob).index(BARS[-1]) == pytest.approx(30, abs=4)
    short = PlannedKnob("rate", "line", "hold", list(range(20)), [1.0] * 20, [], [])
    assert (len(line(short)), ruler(Preview([(0, 10), (10, 20)], {}))) == (20, f"{'|':>11}{'|':>9}")


def test_a_knobs_name_begins_no_formula(tmp_path: Path) -> None:
    knob = PlannedKnob(r"$x\foo$", "line", "hold", [0, 1], [1.0, 1.0], [0.9, 0.9], [1.1, 1.1])
    plan_figure(Preview([(0, 2)], {knob.name: knob}), title=knob.name).savefig(tmp_path / "plan.png")


def test_memory_that_the_system_does_not_tell_is_said_to_be_unknown(
    declared: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    assert call("plan", declared, "--pilot", 1) == 0
    assert "memory: not told by this system\n" in capsys.readouterr().out
