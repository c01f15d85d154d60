"""The command line: exit codes, one-line errors, plain lines without a terminal, tables at the end."""

from __future__ import annotations

import inspect
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

import hdet
import hdet.app.run
from hdet.app.commands import application
from hdet.app.main import main
from hdet.app.run.display import TITLES, Display, show_result
from hdet.app.run.folder import RunFolder
from hdet.app.run.runner import Result
from hdet.history import WindowRecord
from hdet.report import Moves, Verdict

DIGITS = """
task: {kind: digits, width: 16, dropout: 0.3, probe_examples: 8}
steps: 24
batch_size: 8
replicas: 4
gradients: local
schedule: cosine
window: 6
knobs:
  - learning_rate
  - dropout
"""


@pytest.fixture
def declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "digits.yaml").write_text(DIGITS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> int:
    try:
        main(["run", *arguments])
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def test_a_run_from_end_to_end(declared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("digits.yaml", "--set", "steps=18", "--set", "window=9", "--seed", "3", "--compare") == 0
    said = capsys.readouterr().out
    assert "train: 997 digits, sha256 " in said
    assert "training: step 9/18  loss " in said
    assert "the same without hdet: step 18/18" in said
    for word in (
        "learning_rate",
        "dropout",
        "set to",
        "learned",
        "trust",
        "at the end",
        "held-out loss",
        "with hdet",
        "without",
    ):
        assert word in said
    assert "\x1b" not in said, "no escape codes without a terminal"
    kept = hdet.app.run.RunConfig.load(declared / "runs" / "digits" / "config.yaml")
    assert (kept.steps, kept.seed, kept.window) == (18, 3, hdet.windows.FixedWindow(9))


def test_without_knobs_the_recipe_is_taken_and_told(declared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (declared / "bare.yaml").write_text("{task: {kind: digits, width: 16, dropout: 0.3}, steps: 24, replicas: 4}")
    assert run("bare.yaml") == 0
    said = capsys.readouterr().out
    assert "hdet explores:" in said
    assert "+ learning rate: heads for a peak of 0.001" in said
    assert {record.merged for record in hdet.History(declared / "runs" / "bare" / "history.jsonl")} == {False}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digits.yaml", "--set", "stepz=3"], "stepz: no such field; there are ["),
        (["digits.yaml", "--set", "task.widht=3"], "widht: no such field"),
        (["digits.yaml", "--set", "knobs.2.spread.width=3"], "the list has 2 entries"),
        (["digits.yaml", "--set", "knobs.0.kind=learning_rat"], "no knob is called 'learning_rat'"),
        (["digits.yaml", "--set", "knobs.0.groups=head"], "no parameter group 'head'"),
        (["digits.yaml", "--set", "gradients=shared"], "acts in the forward pass"),
        (["digits.yaml", "--set", "replicas=1"], "at least 2 replicas"),
        (["digits.yaml", "--set", "schedule.total_steps=5"], "ends after 5 steps and the run has 24"),
        (["digits.yaml", "--resume"], "nothing to resume"),
        (["digits.yaml", "--set", "stepz=3"], "; did you mean 'steps'?"),
        (["digits.yaml", "--set", "knobs.0.kind=drop_out"], "; did you mean 'dropout'?"),
        (["digits.yaml", "--set", "knobs.0\u00b2=3"], "the list has 2 entries, to be named 0 to 1, not '0\u00b2'"),
        (["digits.yaml", "--set", f"knobs.{'9' * 5000}=3"], "the list has 2 entries"),
        (["digits.yaml", "--set", "a." * 5000 + "b=3"], "no field lies deeper than 100 dots"),
        (["digits.yaml", "--set", "imports=5"], "imports: a list of modules is expected"),
        (["digits.yaml", "--set", "imports=[5]"], "imports: a list of modules is expected"),
        (["digits.yaml", "--set", "imports=json"], "imports: a list of modules is expected"),
        (["digits.yaml", "--set", "imports=[.odd]"], "'.odd' is no name of a module"),
        (["digits.yaml", "--set", "imports=[this_is_absent]"], "there is no module 'this_is_absent'"),
        (
            ["digits.yaml", "--set", 'knobs.0={kind: learning_rate, name: "\\e[2J"}'],
            "'\\x1b[2J', which cannot be printed",
        ),
        (["digits.yaml", "--set", 'knobs.0={kind: learning_rate, name: "\\uD800"}'], "half of a character"),
        (["digits.yaml", "--set", "device=\ud800"], "not valid YAML: unacceptable character"),
        (["digits.yaml", "--set", "task={kind: imported, path: 'json:lods'}"], "has no 'lods'; did you mean 'loads'?"),
        (["absent.yaml"], "cannot read absent.yaml"),
    ],
)
def test_bad_input_is_one_line_exit_2_and_writes_nothing(
    declared: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(*arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1
    assert [path.name for path in declared.iterdir()] == ["digits.yaml"]


def test_a_module_that_fails_when_it_is_imported_is_named_and_debug_shows_where(
    declared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (declared / "broken_kinds.py").write_text("def deep():\n    raise LookupError('no such table')\ndeep()\n")
    assert run("digits.yaml", "--set", "imports=[broken_kinds]") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "importing 'broken_kinds' raised LookupError: no such table; --debug shows where" in said
    assert run("digits.yaml", "--set", "imports=[broken_kinds]", "--debug") == 2
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "in deep" in said
    assert said.splitlines()[-1].startswith("error: digits.yaml: imports: importing")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "digits.yaml", "--sed", "1"], "--seed"),
        (["run"], "Missing argument 'config'. See hdet run --help"),
        (["reprot"], "Did you mean 'report'"),
        (["watch", "here", "--every", "often"], "--every"),
        (["run", "digits.yaml", "--seed", "one"], "as an integer. See hdet run --help"),
        (["run", "digits.yaml", "--frce"], "--force). See hdet run --help"),
        ([], "Missing command. See hdet --help"),
    ],
)
def test_a_line_that_is_not_understood_is_one_line_and_exit_2(
    declared: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    assert said in told


def test_every_command_teaches_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    listed = capsys.readouterr().out
    for command in ("run", "plan", "report", "watch", "export", "knobs", "doctor", "ablate"):
        assert command in listed
        main([command, "--help"])
        said = " ".join(capsys.readouterr().out.split())
        assert f"Example: hdet {command}" in said


def test_no_paragraph_of_a_commands_help_has_line_breaks_of_its_own() -> None:
    """They would be kept, whatever the terminal's width; those of the first paragraph are not."""
    for command in application.registered_commands:
        assert command.callback is not None
        _, *paragraphs = (inspect.getdoc(command.callback) or "").split("\n\n")
        assert [text for text in paragraphs if "\n" in text] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["report", "here", "--figures", "drawn", "--out", "page.html"], "--figures"),
        (["export", "here", "--knob", "learning_rate"], "--as"),
        (["watch", "here", "--port", "8000"], "--serve"),
        (["watch", "here", "--serve", "--once"], "--once looks once"),
        (["watch", "here", "--host", "localhost"], "--serve"),
        (["plan", "digits.yaml", "--effect", "0.1"], "--noise"),
        (["knobs", "controller", "--model", "my_model:build"], "--model"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    declared: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    (declared / "here").mkdir()
    (declared / "here" / "history.jsonl").touch()
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    told = capsys.readouterr().err
    assert (stopped.value.code, "leave it out" in told or "leave them out" in told or "one of them" in told) == (
        2,
        True,
    )
    assert said in told


def test_a_used_folder_needs_force(declared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("digits.yaml", "--out", "here", "--set", "steps=6") == 0
    assert run("digits.yaml", "--out", "here", "--set", "steps=6") == 2
    assert "--force" in capsys.readouterr().err
    assert run("digits.yaml", "--out", "here", "--set", "steps=6", "--force") == 0


def test_a_run_that_fails_exits_1(declared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every replica not finite, again and again."""
    assert run("digits.yaml", "--set", "optimizer={kind: sgd, lr: 1e30}", "--set", "knobs=[dropout]") == 1
    said = capsys.readouterr()
    assert "replicas became non-finite" in said.err
    assert "non_finite" in said.out, "faults are told as they happen"


def test_the_ranks_are_given_a_file_whose_name_begins_with_a_dash(
    declared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (declared / "digits.yaml").rename(declared / "-digits.yaml")
    monkeypatch.setattr("hdet.app.commands.launch", lambda processes, arguments: main(arguments) or 0)
    assert run("--processes", "2", "--set", "steps=6", "--out", "-here", "--", "-digits.yaml") == 0
    assert (declared / "-here" / "result.json").exists()


@pytest.mark.parametrize("debug", [False, True])
def test_ranks_show_tracebacks_where_debug_asks_for_them(
    declared: Path, monkeypatch: pytest.MonkeyPatch, debug: bool
) -> None:
    given: list[str] = []
    monkeypatch.setattr("hdet.app.commands.launch", lambda processes, arguments: given.extend(arguments) or 0)
    assert run("digits.yaml", "--processes", "2", *(["--debug"] if debug else [])) == 0
    assert ("--debug" in given) is debug


def run_until(end: signal.Signals, monkeypatch: pytest.MonkeyPatch, phase: str, *arguments: str) -> int:
    """The exit code of a run that this process is sent a signal in, in the tenth step of a phase."""

    def signalled(self: Display, done: int, losses: object) -> None:
        if done == 10 and self._title == TITLES[phase]:
            assert signal.getsignal(end) is not signal.SIG_DFL, "it would be ended outright"
            os.kill(os.getpid(), end)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest may be in the background
    try:
        with monkeypatch.context() as patched:
            patched.setattr(Display, "step", signalled)
            return run("digits.yaml", *arguments)
    finally:
        signal.signal(signal.SIGINT, before)


ENDS = pytest.mark.parametrize(
    ("end", "word", "code"), [(signal.SIGINT, "interrupted", 130), (signal.SIGTERM, "terminated", 143)]
)


@ENDS
def test_an_interrupt_says_how_to_go_on(
    end: signal.Signals,
    word: str,
    code: int,
    declared: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run_until(end, monkeypatch, "hdet") == code
    assert capsys.readouterr().err == f"{word}; --resume goes on from the end of the last window\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert run("digits.yaml", "--resume") == 0
    assert "going on from step 6" in capsys.readouterr().out


@ENDS
def test_an_interrupt_of_the_comparison_says_that_it_begins_anew(
    end: signal.Signals,
    word: str,
    code: int,
    declared: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run_until(end, monkeypatch, "plain", "--compare") == code
    said = capsys.readouterr().err
    assert said == f"{word}; the run is over, and --resume --compare begins the one without hdet anew\n"
    kept = RunFolder(declared / "runs" / "digits").load_result()
    assert kept is not None
    assert kept["comparing"] is False
    assert run("digits.yaml", "--resume", "--compare") == 0
    assert "the same without hdet: step 1" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["hdet.app.commands.RunConfig.load", "hdet.app.main._run"])
def test_an_interrupt_before_there_is_a_run_is_told(
    where: str, declared: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the file is read, in the command, and as the commands are imported, before there is one."""

    def interrupted(*given: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupted)
    assert run("digits.yaml") == 130
    assert capsys.readouterr().err.strip() == "interrupted"
    assert not (declared / "runs").exists()


def test_without_the_extra_the_command_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "hdet.app.commands", raising=False)
    monkeypatch.setitem(sys.modules, "typer", None)
    assert run("digits.yaml") == 2
    assert "pip install 'hdet[cli]'" in capsys.readouterr().err


def test_the_users_own_task_and_knob_are_found_in_the_working_directory(declared: Path) -> None:
    (declared / "my_cli_kinds.py").write_text(
        "import hdet\n"
        "from hdet.app.tasks import Digits\n"
        "@hdet.spec.register\n"
        "class RateOfMyOwn(hdet.LearningRate):\n"
        "    pass\n"
        "def task(seed, batch_size, device):\n"
        "    return Digits(width=8).build(seed=seed, batch_size=batch_size, device=device)\n"
    )
    (declared / "own.yaml").write_text(
        "imports: [my_cli_kinds]\n"
        "task: {kind: imported, path: 'my_cli_kinds:task'}\n"
        "steps: 6\nwindow: 3\nreplicas: 2\nknobs: [rate_of_my_own]\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "hdet", "run", "own.yaml"],
        cwd=declared,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(hdet.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "rate_of_my_own" in done.stdout


def test_a_run_whose_output_nobody_reads_says_so_and_is_resumed(declared: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(hdet.__file__).parents[1])}
    command = [sys.executable, "-m", "hdet", "run", "digits.yaml", "--set", "steps=2000"]
    with subprocess.Popen(
        command, cwd=declared, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while "training: step" not in process.stdout.readline():
            assert process.poll() is None, "it ended by itself"
        process.stdout.close()
        said = process.stderr.read()
    assert said == "nobody reads the output any more; --resume goes on from the end of the last window\n"
    assert process.returncode == 141
    assert RunFolder(declared / "runs" / "digits").load_checkpoint() is not None


def test_a_process_killed_outright_is_resumed(declared: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(hdet.__file__).parents[1])}
    command = [sys.executable, "-m", "hdet", "run", "digits.yaml", "--set", "steps=100000", "--out", "killed"]
    process = subprocess.Popen(command, cwd=declared, env=environment, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not (declared / "killed" / "checkpoint.pt").exists():
            assert process.poll() is None, "it ended by itself"
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    state = torch.load(declared / "killed" / "checkpoint.pt", weights_only=True)
    windows = len(hdet.History(declared / "killed" / "history.jsonl"))
    assert windows - state["engine"]["window"] in (0, 1)
    config = hdet.app.run.RunConfig.load(declared / "killed" / "config.yaml")
    resumed = hdet.app.run.Run(config, declared / "killed", resume=True)

    class Enough(hdet.app.run.Watcher):
        seen: list[int] = []  # noqa: RUF012

        def window(self, record: WindowRecord, bases: dict[str, float]) -> None:
            self.seen.append(record.window)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resumed(watcher=Enough())
    assert Enough.seen == [state["engine"]["window"]]


@pytest.mark.parametrize("debug", [False, True])
def test_a_warning_is_one_line_without_a_path(declared: Path, debug: bool) -> None:
    (declared / "warns.py").write_text(
        "import warnings\nwarnings.warn('mind\\nthe gap')\nwarnings.warn('old', FutureWarning)\n"
    )
    command = [sys.executable, "-W", "default", "-m", "hdet", "knobs", "window", "--import", "warns"]
    told = subprocess.run(
        [*command, *(["--debug"] if debug else [])], capture_output=True, text=True, check=True
    ).stderr
    assert ("warning: mind the gap\n" in told) is not debug
    assert ("UserWarning: mind" in told) is debug
    assert "FutureWarning: old" in told


# -- the display ------------------------------------------------------------------------------------


def shown(terminal: bool, steps: int = 40) -> str:
    out = io.StringIO()
    display = Display(Console(file=out, force_terminal=terminal, width=100, highlight=False, color_system=None))
    display.begin("hdet", 0, steps)
    record = WindowRecord(0, 0, 10, {"rate": 0.1}, {}, [2.0], {}, {}, True, faults=[{"kind": "non_finite"}])
    for step in range(1, steps + 1):
        display.step(step, [torch.tensor(2.0), torch.tensor(3.0)])
        if step == 10:
            display.window(record, {"rate": 0.125})
    display.end()
    return out.getvalue()


def test_without_a_terminal_there_are_twenty_lines_whatever_the_steps() -> None:
    for steps in (40, 4000):
        said = shown(terminal=False, steps=steps).splitlines()
        lines = [line for line in said if line.startswith("training: ")]
        assert len(lines) == 20
        assert lines[0].startswith(f"training: step {steps // 20}/{steps}  loss 2.5000  ")
        assert lines[0].endswith(" s left")
        assert "window 1  rate 0.125" in lines[-1]
        assert [line for line in said if line not in lines] == ["window 1: kind non_finite"]


def test_the_closing_table_warns_of_a_run_that_learned_nothing(tmp_path: Path) -> None:
    down = Moves(3, 10, 30, 1.5, {"averaged weights": 6.0})
    said = {}
    for progress in (True, False):
        knob = Verdict("rate", 10.0, 0.1, None, down, 1.0, 0.2, 5, 90, 100, progress=progress)
        result = Result(2.3, 2.3, 100, 1.0, [knob], {})
        out = io.StringIO()
        show_result(Console(file=out, width=200), result, RunFolder(tmp_path))
        said[progress] = out.getvalue()
        assert result.to_dict()["knobs"][0]["trust"] == ("clear" if progress else "no progress")
        assert Result.from_dict(result.to_dict()) == result
    assert "no progress" in said[False]
    assert "the run learned nothing, its loss ended where it began; set none of these values" in said[False]
    assert "learned nothing" not in said[True]


def test_a_terminal_gets_a_bar_with_loss_bases_window_and_time_left() -> None:
    text = shown(terminal=True)
    for part in ("training", "━", "40/40", "loss 2.5000", "window 1  rate 0.125", "0:00:0"):
        assert part in text


def test_showing_the_loss_does_not_wait_for_the_device_at_every_step() -> None:
    class Counted:
        reads = 0

        def __float__(self) -> float:
            Counted.reads += 1
            return 1.0

    display = Display(Console(file=io.StringIO(), force_terminal=True))
    display.begin("hdet", 0, 1000)
    for step in range(1, 1001):
        display.step(step, [Counted()])  # type: ignore[list-item]
    display.end()
    assert Counted.reads <= 10


def test_without_posix_modules_there_is_a_command() -> None:
    gone = "import sys; sys.modules.update(fcntl=None, resource=None, termios=None, pwd=None, grp=None)"
    code = f"{gone}; from hdet.app.main import main; main(['doctor'])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert hdet.__version__ in ended.stdout


def test_a_torch_that_is_built_without_its_distributed_package_will_do(declared: Path, tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(
        """
import sys


class Without:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed":
            built = sys.modules["torch._C"]
            for what in [what for what in vars(built) if what.startswith(("_c10d_", "_rpc_", "_distributed_"))]:
                delattr(built, what)
        if name.startswith("torch._C._distributed"):
            raise ModuleNotFoundError(name, name=name)


sys.meta_path.insert(0, Without())
import torch
import hdet
from hdet.app.main import main

assert not torch.distributed.is_available()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
probe = hdet.Probe(lambda model, batch: model(batch).square().mean(), [torch.randn(4, 4) for _ in range(8)])
search = hdet.attach(model, optimizer, probe=probe, total_steps=12, quiet=True)
for _ in range(12):
    search.loss(model(torch.randn(4, 4)).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
assert search.finished
try:
    hdet.checkpoints.CheckpointFolder("here")
except hdet.errors.ConfigError as error:
    assert "by torch.save" in str(error)
else:
    raise AssertionError
main(["run", sys.argv[1], "--processes", "2", "--out", "here"])
"""
    )
    command = [sys.executable, "-W", "ignore", str(script), str(declared / "digits.yaml")]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "this torch is built without torch.distributed; leave it out" in ended.stderr
    assert not (tmp_path / "here").exists()
