"""Local ranks for the distributed benchmarks: processes over gloo, one thread each."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn


def on_ranks(function: Callable[..., None], ranks: int, *arguments: Any) -> None:
    """Run `function(*arguments)` on each of some local ranks."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn(_rank, (ranks, port, function, arguments), nprocs=ranks)


def _rank(rank: int, ranks: int, port: int, function: Callable[..., None], arguments: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    try:
        function(*arguments)
    finally:
        dist.destroy_process_group()
