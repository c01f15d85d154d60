"""`examples/ray_trainer.py` on a local Ray with two workers."""

from __future__ import annotations

import importlib
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

import hdet

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="pip install 'hdet[ray]'"),
    pytest.mark.timeout(600),  # Ray starts a dozen processes, and several import torch
]
EXAMPLE = Path(hdet.__file__).parent.parent / "examples" / "ray_trainer.py"


def test_two_workers_report_each_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    folders = [str(EXAMPLE.parent.parent), str(EXAMPLE.parent)]
    path = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    ray.init(
        num_cpus=3,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
    )
    try:
        found = importlib.import_module(EXAMPLE.stem).train(40, 2, str(tmp_path))
    finally:
        ray.shutdown()
    assert found["step"] == 40
    assert found["learning_rate"] > 1e-4
