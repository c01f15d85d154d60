"""A declared run on several ranks: started by torchrun, or by `hdet run --processes` on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from hdet.errors import ConfigError, HdetError
from hdet.replicas.distributed import process_group

T = TypeVar("T")

GRACE_SECONDS = 10.0
"""How long the other ranks get to tell what happened, once one has failed."""


@contextmanager
def ranks() -> Iterator[None]:
    """The group of all ranks, where torchrun (or `launch`) has started this process as one of several."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
        with process_group():
            yield
    else:
        yield


def world() -> int:
    """How many ranks there are; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if world() > 1 else 0


def leads() -> bool:
    """Whether this rank writes files and speaks to people."""
    return rank() == 0


def led(act: Callable[[], T]) -> T | None:
    """What `act()` returns on the leading rank, which alone calls it; `None` on others.

    Raises:
        HdetError: the leader's, on every rank, so that none waits for one that has gone.
    """
    if world() == 1:
        return act()
    told: list[object] = [None]
    found: T | None = None
    if leads():
        try:
            found = act()
        except HdetError as error:
            told = [error]
    dist.broadcast_object_list(told, src=0)
    if isinstance(told[0], HdetError):
        raise told[0]
    return found


def shared_out(replicas: int, processes: int) -> int:
    """How many of the replicas each process gets.

    Raises:
        ConfigError: they cannot be shared out evenly.
    """
    each, rest = divmod(replicas, processes)
    if rest or each == 0:
        raise ConfigError(
            f"{replicas} replicas cannot be shared out evenly over {processes} processes; take a multiple of "
            f"{processes}, by --replicas or in the file"
        )
    return each


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Run `hdet` with some arguments as several ranks on this machine; returns the exit code.

    Each rank computes on its share of the cores. Only the first one's output is shown, and the errors of the first
    rank that fails.

    Raises:
        ConfigError: this process is itself a rank.
    """
    if "RANK" in os.environ:
        raise ConfigError("--processes starts ranks, but torchrun has started this process as one; leave it out")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes))),
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "hdet", *arguments],
            env={**os.environ, **common, "RANK": str(number), "LOCAL_RANK": str(number)},
            stdout=None if number == 0 else subprocess.DEVNULL,
            stderr=None if number == 0 else subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]
    try:
        return _waited_for(started)
    except KeyboardInterrupt:
        for process in started:
            process.wait()  # the terminal has interrupted them too
        return 130


def _waited_for(started: Sequence[subprocess.Popen[str]]) -> int:
    failed: int | None = None
    while failed is None:
        codes = [process.poll() for process in started]
        if all(code == 0 for code in codes):
            return 0
        failed = next((number for number, code in enumerate(codes) if code), None)
        time.sleep(0.05)
    end = time.monotonic() + GRACE_SECONDS
    for process in started:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.terminate()
    if failed and started[0].poll() in (None, 0):
        _, told = started[failed].communicate()
        print(told, end="", file=sys.stderr)
    code = started[failed].returncode
    if code < 0:
        print(f"error: rank {failed} was ended by signal {-code}; go on by --resume", file=sys.stderr)
        return 1
    return code
