"""A declared run on several ranks: started by torchrun, or by `hdet run --processes` on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryFile
from typing import IO, TypeVar

import torch
import torch.distributed as dist

from hdet.app.ending import INTERRUPTED, TERMINATED, Terminated, ended_early, terminable
from hdet.checkpoints import leader
from hdet.errors import ConfigError, HdetError
from hdet.replicas.distributed.lost_rank import LOST
from hdet.replicas.distributed.process_group import environment_number, process_group
from hdet.replicas.parallel import world

T = TypeVar("T")

LIFELINE = "HDET_LAUNCHER_PIPE"
"""The environment variable that names the end of a pipe whose other end the launcher holds."""

GRACE_SECONDS = 10.0
"""How long the other ranks get to tell what happened, once one has failed."""

GOES_ON = "; --resume goes on from the end of the last window"


@contextmanager
def ranks(device: str) -> Iterator[None]:
    """The group of all ranks, where torchrun (or `launch`) has started this process as one of several."""
    end_with_launcher()
    if environment_number("WORLD_SIZE") > 1:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends a rank at once: a collective that waits runs no handler
        with process_group("gloo" if torch.device(device).type == "cpu" else None):
            yield
    else:
        yield


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if world() > 1 else 0


def leads() -> bool:
    """Whether this rank writes files and speaks to people."""
    return rank() == 0


def led(act: Callable[[], T]) -> T:
    """What `act()` returns on the leading rank, which alone calls it, on every rank.

    Raises:
        HdetError: the leader's, on every rank, so that none waits for one that has gone; an OSError, such as a full
            disk's, as one too.
        LostRankError: another rank is gone.
    """
    outcome = leader.attempted(act, HdetError) if leads() else None  # its own errors say nothing of other ranks
    return leader.broadcast(dist.group.WORLD if world() > 1 else None, outcome)


def restarted() -> bool:
    """Whether torchrun has started these ranks again, after an attempt that failed."""
    return environment_number("TORCHELASTIC_RESTART_COUNT") > 0


def shared_out(replicas: int, processes: int) -> int:
    """How many of the replicas each process gets; a ConfigError where they cannot be shared out evenly."""
    each, rest = divmod(replicas, processes)
    if rest or each == 0:
        raise ConfigError(
            f"{replicas} replicas cannot be shared out evenly over {processes} processes; take a multiple of "
            f"{processes}, by --replicas or in the file"
        )
    return each


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Run `hdet` with some arguments as several ranks on this machine; returns the exit code.

    Each rank computes on its share of the cores. Only the first one's output is shown, and the errors of the rank
    that failed first. The ranks end with this process, however it ends.
    """
    if "RANK" in os.environ:
        raise ConfigError("--processes starts ranks, but torchrun has started this process as one; leave it out")
    if not dist.is_available():
        raise ConfigError("--processes starts ranks, and this torch is built without torch.distributed; leave it out")
    # The store of the ranks is here, as torchrun's is in its agent: a port that is free now may be taken by the time
    # the first rank has imported torch.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    common = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes))),
    }
    with ExitStack() as stack:
        # In files: a rank that has much to say would wait for ever at a pipe that nobody reads.
        told = [stack.enter_context(TemporaryFile("w+")) for _ in range(processes)]
        lifeline, held = os.pipe()  # `held` closes when this process ends, and nobody else has it
        common[LIFELINE] = str(lifeline)
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "hdet", *arguments],
                env={**os.environ, **common, "RANK": str(number), "LOCAL_RANK": str(number)},
                stdout=None if number == 0 else subprocess.DEVNULL,
                stderr=None if number == 0 else told[number],
                pass_fds=(lifeline,),
                start_new_session=True,  # an interrupt from the terminal comes to this process alone, which hands it on
            )
            for number in range(processes)
        ]
        try:
            with terminable():
                return _waited_for(started, told)
        except KeyboardInterrupt as error:
            terminated = isinstance(error, Terminated)
            for process in started:
                process.send_signal(signal.SIGTERM if terminated else signal.SIGINT)
            _ended(started)
            return ended_early(error, GOES_ON) if terminated else INTERRUPTED  # of an interrupt the first rank tells
        finally:
            for process in started:
                process.kill()
            for descriptor in (lifeline, held):
                os.close(descriptor)


def end_with_launcher() -> None:
    """Where `launch` has started this process: end with the process that did, be it killed outright."""
    given = os.environ.pop(LIFELINE, "")  # a child of this process has no such descriptor
    if given.isdecimal():
        threading.Thread(target=_wait_for_the_end, args=(int(given),), daemon=True).start()


def _wait_for_the_end(lifeline: int) -> None:
    os.read(lifeline, 1)  # nothing is ever written: it returns when the other end is closed
    os._exit(TERMINATED)  # at once: files are whole at any time, and a collective that waits hears no signal


def _waited_for(started: Sequence[subprocess.Popen[bytes]], told: Sequence[IO[str]]) -> int:
    """The exit code: 0, or that of the rank which was the cause, whose errors are shown."""
    while True:
        codes = [process.poll() for process in started]
        if all(code == 0 for code in codes):
            return 0
        if any(codes):
            break
        time.sleep(0.05)
    ended = [number for number, code in enumerate(codes) if code]
    alone = _ended(started)
    errors = [_read(file) for file in told]
    # A rank that only missed another is not the cause, even where it was the first to end. (The first rank's errors
    # are on the screen, not in a file; that it was the cause shows in no other having been.)
    own = [number for number in alone if number and started[number].returncode and LOST not in errors[number]]
    cause = next((number for number in ended if number in own), own[0] if own else ended[0])
    if cause:
        print(f"rank {cause}:\n{errors[cause]}", end="", file=sys.stderr)
    code = started[cause].returncode
    if code < 0:
        print(f"error: rank {cause} was ended by signal {-code}; go on by --resume", file=sys.stderr)
        return 1
    return code


def _ended(started: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Wait for all, and end those that take too long; returns the ranks that ended by themselves."""
    alone = []
    end = time.monotonic() + GRACE_SECONDS
    for number, process in enumerate(started):
        try:
            process.wait(max(0.0, end - time.monotonic()))
            alone.append(number)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return alone


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
