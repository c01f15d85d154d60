"""A process group that survives torchrun's restarts, and is always taken down."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module

import torch
import torch.distributed as dist

from hdet.errors import ConfigError

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NUMBERS: dict[str, tuple[int, int | None]] = {
    "WORLD_SIZE": (1, None),
    "RANK": (0, None),
    "LOCAL_RANK": (0, None),
    "LOCAL_WORLD_SIZE": (1, None),
    "MASTER_PORT": (0, 65535),
    "TORCHELASTIC_RESTART_COUNT": (0, None),
}
"""torchrun's variables that hold a whole number, with the least and the most that each may be."""

BEFORE_THE_END: set[Callable[[], object]] = set()
"""What waits for work in the background that needs groups: a checkpoint's save."""


@contextmanager
def process_group(backend: str | None = None, timeout: float = 600.0) -> Iterator[dist.ProcessGroup]:
    """The group of all of torchrun's ranks, inside the block.

    Like `torch.distributed.init_process_group`, with four differences. Each restart of torchrun uses keys of its own
    in the store that all attempts share; without, gloo connects to addresses of the attempt before, and a restart
    hangs or fails. Checkpoints that are written in the background when the block ends are waited for. The group is
    destroyed when the block is left, else the exits of the ranks race. And nothing holds it beyond that: modules of
    torch that keep every group alive which exists when they are first imported (torch 2.13: those that `torch.optim`
    and `fully_shard` draw in) are imported before it is made. A group that is kept alive keeps threads that may abort
    the process at its exit.

    Args:
        backend: by default gloo for tensors on the CPU, and nccl for those on GPUs where each rank of this machine
            has one.
        timeout: seconds after which a rank that does not answer counts as lost.

    Raises:
        ConfigError: torchrun's environment variables are missing, or cannot be.
        CheckpointError: at the block's end, a save in the background failed.
    """
    missing = [name for name in REQUIRED if name not in os.environ]
    if missing:
        alone = "" if "WORLD_SIZE" in missing else "; a process of its own needs no WORLD_SIZE: unset it"
        raise ConfigError(
            f"{', '.join(missing)} not set; start the script by torchrun --nproc-per-node=4 script.py, or set them"
            + alone
        )
    for module in ("torch._dynamo", "torch.distributed.fsdp"):
        import_module(module)
    size = environment_number("WORLD_SIZE")
    rank = environment_number("RANK", size - 1)
    port = environment_number("MASTER_PORT")
    device = environment_number("LOCAL_RANK")
    if backend is None:
        own = torch.cuda.is_available() and environment_number("LOCAL_WORLD_SIZE") <= torch.cuda.device_count()
        backend = "cpu:gloo,cuda:nccl" if own else "gloo"
    limit = timedelta(seconds=timeout)
    # torchrun's agent, or `hdet run --processes`, holds the store itself where it says so; else rank 0 does.
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        port,
        size,
        is_master=rank == 0 and not hosted,
        timeout=limit,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if "nccl" in backend:
        torch.cuda.set_device(device)
    renewed = dist.PrefixStore(f"attempt_{attempt}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=renewed, rank=rank, world_size=size, timeout=limit)
    assert dist.group.WORLD is not None
    try:
        yield dist.group.WORLD
        for wait in tuple(BEFORE_THE_END):
            wait()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def environment_number(name: str, most: int | None = None) -> int:
    """The whole number in one of `NUMBERS`; the least that it may be where it is not set.

    Raises:
        ConfigError: it is no whole number from the least to `most`, by default the variable's own.
    """
    least, largest = NUMBERS[name]
    most = largest if most is None else most
    given = os.environ.get(name, str(least))
    try:
        number = int(given)
    except ValueError:
        number = least - 1
    if number < least or (most is not None and number > most):
        bounds = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise ConfigError(
            f"the environment variable {name} is {given!r}, and should be a whole number {bounds}; torchrun sets it "
            f"for ranks, and a process of its own needs none: unset it"
        )
    return number
