"""`hdet.transformers.Search` where torchrun starts a Trainer on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    path = os.pathsep.join([str(HERE), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    told = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"),
            *(str(HERE / "transformers_job.py"), str(folder)),
        ],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert told.returncode == 0, told.stderr[-4000:]
    assert (folder / "searched" / "checkpoint-9" / "hdet.pt").exists()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def test_ranks_train_one_model_and_decide_the_same(ranks: list[dict[str, Any]], assert_same: Any) -> None:
    one, other = ranks
    for name in one:
        assert_same(one[name]["weights"], other[name]["weights"])
        assert one[name]["shifts"] == other[name]["shifts"]
    assert [found["searched"]["replicas"] for found in ranks] == [0, 2]


def test_held_it_is_the_run_without_it_bit_for_bit(ranks: list[dict[str, Any]], assert_same: Any) -> None:
    for found in ranks:
        assert_same(found["plain"]["weights"], found["held"]["weights"])


def test_a_resume_is_the_same_run_bit_for_bit(ranks: list[dict[str, Any]], assert_same: Any) -> None:
    for found in ranks:
        assert_same(found["searched"]["weights"], found["resumed"]["weights"])
        assert found["searched"]["shifts"] == found["resumed"]["shifts"]


def test_the_losses_are_the_means_by_token_over_all_ranks(ranks: list[dict[str, Any]]) -> None:
    """As the Trainer logs them: it weighs tokens, and hdet takes the mean over ranks and micro-batches."""
    for found in ranks:
        logged = sum(found["held"]["losses"][:2]) / 2  # of the steps 0 to 9, as the first window
        assert found["held"]["told"][0] == pytest.approx(logged, abs=1e-4)
