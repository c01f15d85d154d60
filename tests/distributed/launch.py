"""Real processes for tests: N ranks over gloo, each running one function, with a time limit."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import queue
import random
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# What a rank imports in its first steps as well: imported by the server once, not by every rank. (torch.optim draws in
# torch._dynamo, which alone takes most of a second.)
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint"),
        *("torch.distributed.tensor.parallel", "numpy.random", "pytest", "hypothesis", "hdet"),
    ]
)


def free_port() -> int:
    """A port below those that the kernel hands out itself: no other test's sockets take it before it is listened at."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def start(target: Callable[..., None], ranks: int, *arguments: Any) -> list[Any]:
    """Processes that run `target(rank, ranks, *arguments)`, forked from a server that has imported torch once."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        processes = [
            CONTEXT.Process(target=target, args=(rank, ranks, *arguments), daemon=True) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return processes


def launch(
    function: Callable[..., Any], ranks: int, *arguments: Any, limit: float = 90.0, timeout: float = 30.0
) -> list[Any]:
    """What `function(*arguments)` returned on each rank; its exception, as an AssertionError, if a rank raised."""
    found, failures = _answers(function, ranks, arguments, limit, timeout)
    if any("connectFullMesh failed" in told for told in failures.values()):
        # Ranks that never met, as was seen once where many tests started theirs beside a benchmark.
        found, failures = _answers(function, ranks, arguments, limit, timeout)
    assert not failures, "\n".join(f"rank {rank}:\n{told}" for rank, told in sorted(failures.items()))
    assert len(found) == ranks, f"only the ranks {sorted(found)} of {ranks} answered within {limit} s"
    return [found[rank] for rank in range(ranks)]


def _answers(
    function: Callable[..., Any], ranks: int, arguments: Any, limit: float, timeout: float
) -> tuple[dict[int, Any], dict[int, str]]:
    """What ranks returned, and what went wrong on others."""
    results: Any = CONTEXT.Queue()
    processes = start(_rank, ranks, free_port(), timeout, results, function, arguments)
    found: dict[int, Any] = {}
    failures: dict[int, str] = {}
    end = time.monotonic() + limit
    try:
        while len(found) + len(failures) < ranks and time.monotonic() < end:
            try:
                rank, fine, value = results.get(timeout=0.5)
            except queue.Empty:
                if not any(process.is_alive() for process in processes):
                    break
                continue
            if fine:
                found[rank] = torch.load(io.BytesIO(value), weights_only=False)
            else:
                failures[rank] = value
            if failures:
                end = min(end, time.monotonic() + 5.0)
    finally:
        for process in processes:
            process.join(timeout=5.0 if not failures else 0.5)
            if process.is_alive():
                process.kill()
    return found, failures


def _rank(
    rank: int, ranks: int, port: int, timeout: float, results: Any, function: Callable[..., Any], arguments: Any
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout),
        )
        value = function(*arguments)
        held = io.BytesIO()  # as bytes: a tensor sent by a queue lives in memory that dies with its process
        torch.save(value, held)
        results.put((rank, True, held.getvalue()))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def survivors(
    function: Callable[..., Any], ranks: int, *arguments: Any, limit: float = 40.0, timeout: float = 4.0
) -> dict[int, str]:
    """What the ranks that could still say so ended with: "" where `function` returned, else the error's text.

    All processes have ended by themselves when this returns; an AssertionError otherwise.
    """
    results: Any = CONTEXT.Queue()
    processes = start(_told, ranks, free_port(), timeout, results, function, arguments)
    found: dict[int, str] = {}
    end = time.monotonic() + limit
    try:
        while time.monotonic() < end and any(process.is_alive() for process in processes):
            with contextlib.suppress(queue.Empty):
                rank, told = results.get(timeout=0.2)
                found[rank] = told
        with contextlib.suppress(queue.Empty):
            while True:
                rank, told = results.get(timeout=0.2)
                found[rank] = told
        alive = [rank for rank, process in enumerate(processes) if process.is_alive()]
        assert not alive, f"the ranks {alive} did not end within {limit} s; told so far: {found}"
    finally:
        for process in processes:
            process.kill()
    return found


def _told(
    rank: int, ranks: int, port: int, timeout: float, results: Any, function: Callable[..., Any], arguments: Any
) -> None:
    torch.set_num_threads(1)
    told = ""
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout),
        )
        function(*arguments)
    except BaseException as error:
        told = f"{type(error).__name__}: {error}"
    results.put((rank, told))
    if not told:
        dist.destroy_process_group()
