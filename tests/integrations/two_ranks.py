"""A job that torchrun starts on two ranks over gloo, each of which leaves what it found in a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent


def found_by(job: str, folder: Path, *, limit: float) -> list[Any]:
    """What `job`, a file beside this one that is given a folder, has saved there as rank0.pt and rank1.pt.

    Args:
        limit: seconds for the whole job.
    """
    path = os.pathsep.join([str(HERE), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    told = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"),
            *(str(HERE / job), str(folder)),
        ],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=limit,
    )
    assert told.returncode == 0, told.stderr[-4000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
