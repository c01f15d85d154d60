"""The commands that look: watch, export, knobs, doctor."""

from __future__ import annotations

import fcntl
import io
import itertools
import json
import os
import platform
import pty
import runpy
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from rich.console import Console
from small_run import DIGITS, call

import hdet
import hdet.app.doctor as doctor
from hdet.app.report import reported_run
from hdet.app.run import Run, RunConfig, Watcher
from hdet.app.run.folder import RunFolder
from hdet.app.serving import PageServer
from hdet.app.watch import _Drawn
from hdet.document import parse
from hdet.errors import ConfigError
from hdet.record import WindowRecord

MOVED = RunConfig.from_dict(
    {**DIGITS, "knobs": ["learning_rate", {"kind": "dropout", "controller": {"kind": "gated", "gate": 0.0}}]}
)


class Killed(Watcher):
    """Ends the run as a kill would."""

    def step(self, done: int, losses: object) -> None:
        if done == 14:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def under_way(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in its third window."""
    folder = tmp_path_factory.mktemp("runs") / "under_way"
    with pytest.raises(KeyboardInterrupt):
        Run(MOVED, folder)(watcher=Killed())
    return folder


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended."""
    folder = tmp_path_factory.mktemp("runs") / "over"
    Run(MOVED, folder)()
    return folder


# -- watch ------------------------------------------------------------------------------------------


def test_a_run_under_way_is_shown(under_way: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("watch", str(under_way)) == 0
    said = capsys.readouterr().out
    assert "under_way: step 12 of 24, window 2" in said
    assert "s left" in said
    assert "learning_rate" in said
    assert "\ntraining loss" in said
    assert "over: " not in said
    last = hdet.History(under_way / "history.jsonl").windows[-1]
    assert f"{last.learned['learning_rate']['closed']:.4g}" in said


def test_a_narrow_terminal_breaks_cells_and_cuts_none(
    under_way: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert call("watch", str(under_way)) == 0
    said = capsys.readouterr().out
    assert "\N{HORIZONTAL ELLIPSIS}" not in said
    rows = [[cell.strip() for cell in line.split("\N{BOX DRAWINGS LIGHT VERTICAL}")] for line in said.splitlines()]
    cells = ["".join(column) for column in zip(*(row for row in rows if len(row) == 7), strict=True)]
    assert "learning_rate" in cells[1]
    last = hdet.History(under_way / "history.jsonl").windows[-1]
    assert f"{last.learned['learning_rate']['closed']:.4g}" in cells[3]


def test_a_run_that_ended_in_no_finite_loss_is_over(
    over: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(over, tmp_path / "diverged")
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "test_loss": None}))
    *whole, last = (folder / "history.jsonl").read_text().splitlines()
    last = json.dumps({**json.loads(last), "losses": [None] * 4, "mean_loss": None})
    (folder / "history.jsonl").write_text("\n".join([*whole, last]) + "\n")
    assert call("watch", str(folder)) == 0
    said = capsys.readouterr().out
    assert "training loss not finite; " in said
    assert "over: held-out loss not finite" in said


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_to_be_compared_is_watched_until_the_other_has_ended(
    over: Path, tmp_path: Path, terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(over, tmp_path / "compared")
    result = {**json.loads((folder / "result.json").read_text()), "test_loss": 1.25}
    (folder / "result.json").write_text(json.dumps({**result, "comparing": True}))
    waited = []

    def compared(seconds: float) -> None:
        waited.append(seconds)
        (folder / "result.json").write_text(json.dumps({**result, "comparing": False, "plain": {"test_loss": 1.5}}))

    monkeypatch.setattr("time.sleep", compared)
    monkeypatch.setattr(Console, "is_terminal", terminal)
    with RunFolder(folder).held():
        assert call("watch", str(folder)) == 0
    said = capsys.readouterr().out
    assert "trained: held-out loss 1.2500; the same run without hdet is trained now" in said
    assert waited == ([2.0] if terminal else [])
    assert ("over: held-out loss 1.2500; 1.5000 without hdet" in said) == terminal


@pytest.mark.parametrize("host", [platform.node(), "another", None])
def test_a_comparison_that_was_killed_outright_is_waited_for_no_longer(
    host: str | None, over: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(over, tmp_path / "killed")
    result = {**json.loads((folder / "result.json").read_text()), "comparing": True, "host": host}
    if host is None:
        del result["host"]  # as older versions wrote it
    (folder / "result.json").write_text(json.dumps(result))
    drawn = _Drawn(folder)
    with RunFolder(folder).held():
        assert reported_run(folder).comparing
        assert drawn()[1], "the page is refreshed"
    known = host == platform.node()
    assert reported_run(folder).over == known, "another machine's lock need not be seen here"
    assert drawn()[1] == (not known), "though no file has changed since"


def test_a_folder_is_held_by_the_locks_of_filelock_3_12(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lock(FileLock):
        def __init__(self, lock_file: Path) -> None:  # `blocking` came with 3.14
            super().__init__(lock_file)

    monkeypatch.setattr("hdet.app.run.folder.FileLock", Lock)
    with (
        RunFolder(tmp_path).held(),
        pytest.raises(ConfigError, match="another process is at the run in"),
        RunFolder(tmp_path).held(),
    ):
        pass


def test_a_run_begins_while_its_folder_is_looked_at(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.held():
        pass
    with (tmp_path / ".run.lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # as `taken` has it
        threading.Timer(0.05, fcntl.flock, (lock, fcntl.LOCK_UN)).start()
        with folder.held():
            assert folder.taken()


def test_before_the_first_window_and_where_there_is_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("watch", str(tmp_path)) == 0
    assert "no window has closed yet" in capsys.readouterr().out
    assert call("watch", str(tmp_path / "absent")) == 2
    assert "there is nothing at" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["report"], ["watch"], ["export"], ["ablate", "study.yaml", "--out"]])
def test_a_folder_that_may_not_be_entered_is_one_line(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shut = tmp_path / "shut"
    shut.mkdir()
    (tmp_path / "study.yaml").write_text(json.dumps({"base": DIGITS}))

    def seen(path: Path) -> bool:
        if shut in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return os.path.exists(path)

    monkeypatch.chdir(tmp_path)
    for method in ("exists", "is_file"):
        monkeypatch.setattr(Path, method, seen)
    assert call(*command, shut) == 2
    assert f"{shut} may not be read: [Errno 13]" in capsys.readouterr().err


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_in_a_folder_that_may_not_be_entered_is_one_line(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(json.dumps(DIGITS))
    inside = tmp_path / "shut" / "run"

    def seen(path: Path) -> bool:
        if path == inside:
            raise PermissionError(13, "Permission denied", str(path))
        return os.path.exists(path)

    monkeypatch.setattr(Path, "exists", seen)
    assert call("run", tmp_path / "run.yaml", "--out", inside, "--processes", processes) == 2
    assert f"{inside} may not be read: [Errno 13]" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may enter every folder")
@pytest.mark.parametrize("command", [["report"], ["watch"], ["export"], ["ablate", "study.yaml", "--out"]])
def test_a_folder_without_permissions_is_one_line_on_every_python(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shut = tmp_path / "shut"
    shut.mkdir(mode=0)
    (tmp_path / "study.yaml").write_text(json.dumps({"base": DIGITS}))
    monkeypatch.chdir(tmp_path)
    for name, method in {"exists": os.path.exists, "is_file": os.path.isfile, "is_dir": os.path.isdir}.items():
        monkeypatch.setattr(Path, name, lambda path, method=method, **more: method(path))  # as of Python 3.14
    assert call(*command, shut) == 2
    assert f"{shut} may not be read: [Errno 13]" in capsys.readouterr().err


def test_in_a_terminal_the_view_ends_with_the_run(over: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "PYTHONPATH": str(Path(hdet.__file__).parents[1])}
    process = subprocess.Popen([sys.executable, "-m", "hdet", "watch", str(over)], stdout=theirs, env=environment)
    os.close(theirs)
    assert process.wait(120) == 0
    said = os.read(ours, 100_000).decode()
    os.close(ours)
    assert "over: held-out loss" in said
    assert "step 24 of 24" in said


@pytest.mark.parametrize("serve", [True, False])
@pytest.mark.parametrize(("end", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_ctrl_c_leaves_a_view_and_sigterm_is_told(
    end: signal.Signals,
    code: int,
    serve: bool,
    under_way: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def signalled(*given: object) -> None:
        os.kill(os.getpid(), end)

    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes any output for a terminal
    monkeypatch.setattr(PageServer, "serve_forever", signalled)
    monkeypatch.setattr("hdet.app.watch.time.sleep", signalled)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest may be in the background
    try:
        assert call("watch", under_way, *(["--serve"] if serve else [])) == code
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err.strip() == ("terminated" if code else "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["knobs", "export", "--version", "run --help"])
def test_a_command_whose_output_nobody_reads_ends_with_141(command: str, unbuffered: str, over: Path) -> None:
    heard, printed = os.pipe()
    os.close(heard)
    arguments = [sys.executable, "-m", "hdet", *command.split(), *([str(over)] if command == "export" else [])]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with os.fdopen(printed, "wb") as output:
        done = subprocess.run(
            arguments, stdout=output, stderr=subprocess.PIPE, check=False, timeout=120, env=environment
        )
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a device that is full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["knobs", "--help"])
def test_an_output_that_does_not_fit_is_told_in_one_line(command: str, unbuffered: str) -> None:
    with open("/dev/full", "wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", "hdet", command],
            stdout=output,
            stderr=subprocess.PIPE,
            check=False,
            timeout=120,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    said = b"error: nothing more can be printed: [Errno 28] No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.parametrize("command", [["knobs"], ["watch", "--once"], ["report"]])
def test_a_command_without_an_output_ends_well(
    command: list[str], over: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout", None)  # as after >&-
    shutil.copytree(over, tmp_path / "run")
    assert call(*command, *([] if command == ["knobs"] else [tmp_path / "run"])) == 0
    assert capsys.readouterr().err == ""


def test_a_pipe_that_breaks_elsewhere_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(*given: object) -> None:
        raise BrokenPipeError(32, "the data server has died")

    monkeypatch.setattr("hdet.app.knobs.listed", gone)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert call("knobs") == 1
    said = capsys.readouterr().err
    assert "such as a server of data, has closed the connection ([Errno 32] the data server has died)" in said


def test_a_terminal_obeys_no_name_of_a_history(over: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text((over / "history.jsonl").read_text().replace("dropout", "drop\\u001b[2Jout"))
    assert call("watch", str(path)) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "drop\\x1b[2Jout" in said


# -- export -----------------------------------------------------------------------------------------


def test_exported_yaml_is_the_base_of_every_step_to_the_last_bit(
    over: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("export", str(over)) == 0
    found = parse(capsys.readouterr().out, name="export")
    history = hdet.History(over / "history.jsonl")
    for knob in ("learning_rate", "dropout"):
        course: list[float] = []
        pieces = sorted(found[knob]["bases"].items())
        for (start, bases), (stop, _) in itertools.pairwise([*pieces, (found[knob]["total_steps"], None)]):
            course += bases if isinstance(bases, list) else [bases] * (stop - start)
        assert tuple(course) == hdet.schedules.Replay.of(history, knob).values


@pytest.mark.parametrize("total_steps", [None, 24, 60, 7])
def test_an_exported_scheduler_gives_a_plain_optimizer_the_runs_rates(
    over: Path, tmp_path: Path, total_steps: int | None
) -> None:
    assert call("export", str(over), "--as", "lambda-lr", "--out", str(tmp_path / "schedule.py")) == 0
    module = runpy.run_path(str(tmp_path / "schedule.py"))
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.3)
    scheduler = module["scheduler"](optimizer, total_steps)
    rates = []
    for _ in range(total_steps or 24):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == rates[-1]  # held past the end
    recorded = hdet.schedules.Replay.of(hdet.History(over / "history.jsonl"), "learning_rate", total_steps).values
    assert tuple(rates) == recorded
    assert len(set(recorded)) > 5


def test_an_exported_scheduler_keeps_the_ratios_of_groups(over: Path, tmp_path: Path) -> None:
    """As `hdet.ReplayLR` does; a group whose rate is 0 stays there."""
    assert call("export", str(over), "--as", "lambda-lr", "--out", str(tmp_path / "schedule.py")) == 0
    module = runpy.run_path(str(tmp_path / "schedule.py"))
    made = []
    for scheduled in (module["scheduler"], lambda one: hdet.ReplayLR(one, hdet.History(over / "history.jsonl"))):
        groups = [{"params": torch.nn.Linear(2, 1).parameters(), "lr": rate} for rate in (0.0, 0.01, 0.003)]
        optimizer = torch.optim.SGD(groups)
        scheduler = scheduled(optimizer)
        rates = []
        for _ in range(24):
            rates.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            scheduler.step()
        made.append(rates)
    assert made[0] == made[1]
    assert made[0][5][2] == made[0][5][1] * (0.003 / 0.01)


def test_what_cannot_be_exported_is_named(over: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("export", str(over), "--as", "lambda-lr", "--knob", "drop_out") == 2
    assert "did you mean 'dropout'?" in capsys.readouterr().err
    assert call("export", str(over), "--as", "lambda-lr", "--knob", "dropout") == 2
    assert "LambdaLR writes learning rates, and 'dropout' is none" in capsys.readouterr().err
    for names, said in (
        ("learning_rate[0] learning_rate[1]", "several learning rates"),
        ("weight_decay dropout", "has no learning_rate"),
    ):
        path, (first, second) = tmp_path / "other.jsonl", names.split()
        path.write_text(
            (over / "history.jsonl").read_text().replace('"learning_rate"', f'"{first}"').replace("dropout", second)
        )
        assert call("export", str(path), "--as", "lambda-lr") == 2
        assert said in capsys.readouterr().err
    assert call("export", str(path), "--as", "lambda-lr", "--knob", "weight_decay") == 2
    for folder in (".", "/", tmp_path):
        assert call("export", str(over), "--out", str(folder)) == 2
        assert f"{folder} cannot be written to: it is a folder; choose another --out" in capsys.readouterr().err
    (tmp_path / "bare").mkdir()
    hdet.History(tmp_path / "bare" / "history.jsonl").append(
        WindowRecord(0, 0, 10, {}, {}, [2.0], {}, {}, merged=False)
    )
    for form in ("yaml", "lambda-lr"):
        assert call("export", str(tmp_path / "bare"), "--as", form) == 1
        said = capsys.readouterr()
        assert "has no knob whose course it could write" in said.err
        assert said.out == ""
    (tmp_path / "history.jsonl").write_text("")
    assert call("export", str(tmp_path)) == 1
    assert "no window that has closed" in capsys.readouterr().err


# -- knobs and doctor -------------------------------------------------------------------------------


def test_every_family_is_listed_with_fields_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("knobs") == 0
    said = capsys.readouterr().out
    for line in (
        "knob:",
        "  learning_rate: ",
        "controller:",
        "  calibrate: ",
        "    max_lr: required",
        "    authority: 1.0",
        '    rules: [{"kind": "cut_back", "huge": 12.0',
    ):
        assert f"\n{line}" in f"\n{said}", line
    for family in ("rule", "veto", "task", "estimator", "signal", "optimizer", "guard"):
        assert call("knobs", family) == 0
        assert capsys.readouterr().out in said
    assert call("knobs", "spaec") == 2
    assert "did you mean 'space'?" in capsys.readouterr().err


def test_ones_own_members_and_model_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "looked_at.py").write_text(
        "import torch, hdet\n"
        "@hdet.spec.register\n"
        "class RateToLookAt(hdet.LearningRate):\n"
        "    '''A rate of one's own.'''\n"
        "def build():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1))\n"
        "    return model, torch.optim.AdamW(model.parameters(), lr=0.01)\n"
        "def built(width):\n"
        "    return build()\n"
        "def odd():\n"
        "    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert call("knobs", "knob", "--import", "looked_at") == 0
    assert "  rate_to_look_at: A rate of one's own." in capsys.readouterr().out
    assert call("knobs", "--model", "looked_at:build") == 0
    said = capsys.readouterr().out
    assert "learning rate" in said
    assert "dropout" in said
    for argument, message in (
        ("looked_at:bild", "did you mean 'build'?"),
        ("looked_at:built", "built is called without arguments: missing a required argument: 'width'"),
        ("looked_at:odd", "must return a model and its optimizer"),
        ("looked_at", "takes module:function"),
    ):
        assert call("knobs", "--model", argument) == 2
        assert message in capsys.readouterr().err


def test_the_doctor_names_versions_devices_and_what_is_odd(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("doctor") == 0
    said = capsys.readouterr().out
    for word in (f"hdet {hdet.__version__}", f"torch {torch.__version__}", "devices: cpu", "gloo", "cores: "):
        assert word in said
    monkeypatch.setattr(doctor, "_version", lambda package: None if package == "jinja2" else "1")
    assert call("doctor") == 0
    said = capsys.readouterr().out
    assert "jinja2 missing: hdet report, and hdet watch --serve, need them; pip install 'hdet[report]'" in said
    assert "plotly missing" not in said


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"RANK": "0"}, ["RANK is set and WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not: start ranks by torchrun"]),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, ["RANK is set and MASTER_ADDR is not: start ranks by"]),
        ({"MASTER_ADDR": "here", "MASTER_PORT": "1"}, []),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}, []),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "x"},
            [
                "the environment variable RANK is '2', and should be a whole number from 0 to 1; torchrun sets it",
                "the environment variable MASTER_PORT is 'x', and should be a whole number from 0 to 65535; torchrun",
            ],
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "here", "MASTER_PORT": "70000"},
            ["the environment variable MASTER_PORT is '70000', and should be a whole number from 0 to 65535; torchrun"],
        ),
        (
            {"WORLD_SIZE": "abc"},
            [
                "WORLD_SIZE is set and RANK, MASTER_ADDR, MASTER_PORT are not: start ranks by torchrun",
                "the environment variable WORLD_SIZE is 'abc', and should be a whole number of at least 1; torchrun",
            ],
        ),
    ],
)
def test_the_doctor_says_by_which_variables_ranks_do_not_find_each_other(
    given: dict[str, str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in doctor.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    said = set(doctor.problems())
    for name, value in {**given, "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    told = [line for line in doctor.problems() if line not in said]
    assert [line[: len(start)] for line, start in zip(told, expected, strict=True)] == expected
