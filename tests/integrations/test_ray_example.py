"""`examples/ray_trainer.py` on a local Ray with two workers, and a run that is held beside it."""

from __future__ import annotations

import importlib
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="pip install 'hdet[ray]'"),
    pytest.mark.timeout(600),  # Ray starts a dozen processes, and several import torch
]
HERE = Path(__file__).parent
EXAMPLE = Path(hdet.__file__).parent.parent / "examples" / "ray_trainer.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The example's last report, and by rank what the workers left."""
    import ray

    folder = tmp_path_factory.mktemp("ray")
    folders = [str(EXAMPLE.parent.parent), str(EXAMPLE.parent), str(HERE)]
    path = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(EXAMPLE.parent)
        job = importlib.import_module("ray_job")
        example = importlib.import_module(EXAMPLE.stem)
        patched.setattr(example, "train_on_a_worker", job.work)
        ray.init(
            num_cpus=3,
            include_dashboard=False,
            runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", job.FOLDER: str(folder)}},
        )
        try:
            report = example.train(40, 2, str(folder))
        finally:
            ray.shutdown()
    return {"report": report, "ranks": [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]}


def test_two_workers_report_each_window(found: dict[str, Any]) -> None:
    assert found["report"]["step"] == 40
    assert found["report"]["learning_rate"] > 1e-4


def test_held_it_is_the_run_without_it_bit_for_bit(found: dict[str, Any], assert_same: Any) -> None:
    for rank in found["ranks"]:
        assert_same(rank["held"], rank["plain"])
