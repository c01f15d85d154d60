"""Ranks that `hdet run --processes` or torchrun starts: their errors, signals and restarts; real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import pytest
import torch.distributed as dist
from launch import free_port
from test_run_on_ranks import DECLARED

import hdet
from hdet.app import ending
from hdet.app.run import Run, RunConfig, launching
from hdet.errors import ConfigError, HdetError
from hdet.replicas.distributed.lost_rank import LOST

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

STRUCK = """
import os, signal
import hdet

plain = hdet.Engine.step

def step(self, losses=None):
    if os.environ.get("RANK") == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and self.step_count == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(self, losses)

hdet.Engine.step = step
"""

NOISY = """
import os, sys
open(f"rank{os.environ.get('RANK')}.pid", "w").write(str(os.getpid()))
if os.environ.get("RANK") == "1":
    sys.stderr.write("noise " * 40_000)
"""


def declared(folder: Path, module: str, **changes: object) -> Path:
    """A run whose imports hold some code, in a folder of its own."""
    (folder / "own_module.py").write_text(module)
    path = folder / "run.yaml"
    text = DECLARED.replace("replicas: 4", "replicas: 2") + "imports: [own_module]\n"
    path.write_text("".join(line for line in text.splitlines(True) if line.split(":")[0] not in changes))
    with path.open("a") as file:
        file.writelines(f"{key}: {value}\n" for key, value in changes.items())
    return path


def started(*codes: str) -> tuple[list[subprocess.Popen[bytes]], list[IO[str]]]:
    """Processes in the place of ranks."""
    files = [TemporaryFile("w+") for _ in codes]  # noqa: SIM115 (they close with the test)
    return [
        subprocess.Popen([sys.executable, "-c", code], stderr=file if number else None)
        for number, (code, file) in enumerate(zip(codes, files, strict=True))
    ], files


def test_the_cause_is_told_though_another_rank_ends_before(capsys: pytest.CaptureFixture[str]) -> None:
    lost = f"import sys; sys.exit({'error: in forward: ' + LOST!r})"
    processes, files = started(lost, lost, "import time; time.sleep(1); raise ValueError('THE CAUSE')")
    assert launching._waited_for(processes, files) == 1
    told = capsys.readouterr().err
    assert "rank 2:" in told
    assert "THE CAUSE" in told
    assert "rank 1" not in told


def test_a_rank_that_a_signal_ends_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    processes, files = started("pass", "import os; os.kill(os.getpid(), 9)")
    assert launching._waited_for(processes, files) == 1
    assert "rank 1 was ended by signal 9" in capsys.readouterr().err


def test_a_number_of_ranks_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "0")  # without RANK, too
    with pytest.raises(ConfigError, match="the environment variable WORLD_SIZE is '0'"), launching.ranks("cpu"):
        pass


def test_several_ranks_without_a_number_each_do_not_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a job script that exports the number of ranks, whose processes torchrun has not started."""
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = r"RANK, MASTER_ADDR, MASTER_PORT not set; .* WORLD_SIZE: unset it"
    with pytest.raises(ConfigError, match=said), launching.ranks("cpu"):
        pass


def test_a_full_disk_of_the_leader_is_an_error_of_hdet() -> None:
    def write() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(HdetError, match="No space left on device") as told:
        launching.led(write)
    assert type(told.value) is HdetError  # it may be any file of the run


def test_an_error_of_the_leaders_own_is_no_lost_rank() -> None:
    def act() -> None:
        raise RuntimeError("libnccl.so cannot be loaded")

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match=r"^libnccl\.so cannot be loaded$"):
            launching.led(act)
    finally:
        dist.destroy_process_group()


TAKER = """#!{python}
import errno, os, socket, sys
if os.environ["RANK"] == "0":
    try:
        socket.socket().bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
    except OSError as error:
        sys.exit(0 if error.errno == errno.EADDRINUSE else 3)
    sys.exit(4)
"""


def test_nobody_can_take_the_port_before_the_ranks_meet_at_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are programs that try to."""
    program = tmp_path / "program"
    program.write_text(TAKER.format(python=sys.executable))
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    assert launching.launch(2, []) == 0


def test_told_to_end_it_ends_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ranks are programs that sleep."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho $$ > part$RANK\nmv part$RANK rank$RANK.pid\nexec sleep 100\n")
    program.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(program))
    before = signal.getsignal(signal.SIGTERM)
    pids = [tmp_path / f"rank{rank}.pid" for rank in range(2)]

    over = threading.Event()

    def end() -> None:
        while signal.getsignal(signal.SIGTERM) is before or not all(pid.exists() for pid in pids):
            if over.wait(0.1):
                return
        if not over.wait(0.1):
            os.kill(os.getpid(), signal.SIGTERM)

    teller = threading.Thread(target=end)
    teller.start()
    try:
        assert launching.launch(2, []) == ending.TERMINATED
    finally:
        over.set()
        teller.join()
    assert capsys.readouterr().err == "terminated; --resume goes on from the end of the last window\n"
    assert not any(alive(int(pid.read_text())) for pid in pids)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_rank_that_says_much_is_not_held_up_and_ranks_end_with_their_launcher(
    end: signal.Signals, tmp_path: Path
) -> None:
    """Signalled alone, as a terminal's Ctrl-C is not; killed, it can do nothing more."""
    path = declared(tmp_path, NOISY, steps=100_000)
    process = subprocess.Popen(
        [sys.executable, "-m", "hdet", "run", str(path), "--processes", "2", "--out", "out"],
        env=ENVIRONMENT,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
    )
    history = tmp_path / "out" / "history.jsonl"
    limit = time.monotonic() + 100
    while not history.exists() and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.1)
    process.send_signal(end)
    assert process.wait(60) == {signal.SIGINT: ending.INTERRUPTED, signal.SIGKILL: -9}[end]
    assert history.exists()  # a window has closed: both ranks trained
    ranks = [int((tmp_path / f"rank{rank}.pid").read_text()) for rank in range(2)]
    limit = time.monotonic() + 60
    while any(map(alive, ranks)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not any(map(alive, ranks))


def alive(process: int) -> bool:
    """Whether a process runs; one that has ended and was not yet waited for by its new parent does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.timeout(200)
def test_torchrun_starts_a_run_again_and_it_goes_on(tmp_path: Path) -> None:
    path = declared(tmp_path, STRUCK)
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=3"),
            *("--monitor-interval=0.2", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-backend=c10d"),
            *("-m", "hdet", "run", str(path), "--out", "out"),
        ],
        env=ENVIRONMENT,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "exitcode: -9" in ended.stderr  # the kill did happen

    Run(RunConfig.load(path, ["imports=[]"]), tmp_path / "one")()
    ours, theirs = (hdet.History(tmp_path / name / "history.jsonl") for name in ("out", "one"))
    assert [record.window for record in ours] == [0, 1, 2]
    for found, expected in zip(ours, theirs, strict=True):
        assert (found.bases, found.values, found.losses) == (expected.bases, expected.values, expected.losses)
