"""`hdet doctor`: what an issue needs to know of this machine, in one paste."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

import hdet
from hdet.errors import ConfigError
from hdet.replicas.distributed.process_group import NUMBERS, REQUIRED, environment_number

PACKAGES = {
    "core": ("torch", "pydantic", "numpy"),
    "cli": ("pyyaml", "typer", "rich", "matplotlib", "scikit-learn", "filelock"),
    "study": ("scipy",),
    "report": ("plotly", "jinja2"),
    "integrations": ("lightning", "transformers", "accelerate", "deepspeed"),
}
"""By extra, the packages that hdet can use. The last are the user's own."""

NEEDS = {
    "cli": "every command but this one needs them",
    "study": "hdet ablate needs it",
    "report": "hdet report, and hdet watch --serve, need them",
}

VARIABLES = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", *NUMBERS, "MASTER_ADDR")


def doctor() -> None:
    """Print versions, devices, backends and what commonly goes wrong, to paste into an issue.

    Example: hdet doctor
    """
    found = [f"- {problem}" for problem in problems()]
    print("\n".join([*facts(), "", *(["to look at:", *found] if found else ["nothing odd found"])]))


def facts() -> Iterator[str]:
    """Lines of a name and a value each."""
    yield f"hdet {hdet.__version__}, from {Path(hdet.__file__).parent}"
    yield f"python {platform.python_version()} ({sys.executable}), {platform.platform()}"
    for extra, names in PACKAGES.items():
        yield f"{extra}: " + ", ".join(f"{name} {_version(name) or '-'}" for name in names)
    yield f"cores: {os.cpu_count()}, torch threads: {torch.get_num_threads()}"
    yield f"devices: {', '.join(_devices())}"
    yield f"torch.distributed: {', '.join(_backends()) or 'not built in'}"
    given = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    yield f"environment: {', '.join(given) or 'none of ' + ', '.join(VARIABLES)}"


def problems() -> Iterator[str]:
    """What commonly goes wrong, a line each."""
    for extra, needs in NEEDS.items():
        missing = [name for name in PACKAGES[extra] if _version(name) is None]
        if missing:
            yield f"{', '.join(missing)} missing: {needs}; pip install 'hdet[{extra}]'"
    cores = os.cpu_count() or 1
    if torch.get_num_threads() > 1 and "WORLD_SIZE" in os.environ and "OMP_NUM_THREADS" not in os.environ:
        yield f"several ranks with {torch.get_num_threads()} threads each on {cores} cores: set OMP_NUM_THREADS"
    if torch.version.cuda is not None and not torch.cuda.is_available():
        yield "torch is built for CUDA and finds no device: see nvidia-smi, and CUDA_VISIBLE_DEVICES"
    yield from _of_ranks()
    if (Path.cwd() / "hdet").is_dir() and Path.cwd() / "hdet" != Path(hdet.__file__).parent:
        yield f"the folder ./hdet here is not the library that runs ({Path(hdet.__file__).parent})"


def _of_ranks() -> Iterator[str]:
    """What is wrong with the variables by which ranks find each other."""
    given = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    missing = [name for name in REQUIRED if name not in os.environ]
    if given and missing:
        names, are = ", ".join(missing), "is" if len(missing) == 1 else "are"
        yield f"{given[0]} is set and {names} {are} not: start ranks by torchrun, or by hdet run --processes"
    numbers: dict[str, int] = {}
    for name in NUMBERS:
        most = numbers["WORLD_SIZE"] - 1 if name == "RANK" and "WORLD_SIZE" in numbers else None
        try:
            if name in os.environ:
                numbers[name] = environment_number(name, most)
        except ConfigError as error:
            yield str(error)


def _version(package: str) -> str | None:
    """As installed; None where it is not. Torch itself tells for which CUDA it is built, its package may not."""
    if package == "torch":
        return torch.__version__
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> list[str]:
    found = ["cpu"]
    for index in range(torch.cuda.device_count()):
        gigabytes = torch.cuda.get_device_properties(index).total_memory / 2**30
        found.append(f"cuda:{index} {torch.cuda.get_device_name(index)} ({gigabytes:.0f} GiB)")
    if torch.backends.mps.is_available():
        found.append("mps")
    return found


def _backends() -> list[str]:
    if not dist.is_available():
        return []
    return [name for name in ("gloo", "nccl", "mpi") if dist.is_backend_available(name)]
