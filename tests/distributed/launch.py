"""Real processes for tests: N ranks over gloo, each running one function, with a time limit."""

from __future__ import annotations

import io
import multiprocessing
import os
import queue
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(function: Callable[..., Any], ranks: int, *arguments: Any, limit: float = 90.0, timeout: float = 30.0) -> list[Any]:
    """What `function(*arguments)` returned on each rank; its exception, as an AssertionError, if a rank raised."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    port = free_port()
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    processes = [
        context.Process(target=_rank, args=(function, rank, ranks, port, timeout, results, arguments), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    if before is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = before
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
    assert not failures, "\n".join(f"rank {rank}:\n{told}" for rank, told in sorted(failures.items()))
    assert len(found) == ranks, f"only the ranks {sorted(found)} of {ranks} answered within {limit} s"
    return [found[rank] for rank in range(ranks)]


def _rank(
    function: Callable[..., Any], rank: int, ranks: int, port: int, timeout: float, results: Any, arguments: Any
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
