"""`hdet.deepspeed.attach` on real engines, two ranks on gloo, ZeRO stages 0 to 3."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="pip install 'hdet[deepspeed]'")
HERE = Path(__file__).parent
Found = dict[Any, Any]
SETTINGS = [(0, False), (1, False), (2, False), (1, True), (2, True)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("deepspeed")
    path = os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    told = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"),
            *(str(HERE / "deepspeed_job.py"), str(folder)),
        ],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=175,
    )
    assert told.returncode == 0, told.stderr[-4000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("setting", SETTINGS)
def test_held_it_is_the_run_without_it_bit_for_bit(setting: Any, ranks: list[Found], assert_same: Any) -> None:
    for found in ranks:
        assert found[setting]["held"]["steps"] == 24
        assert found[setting]["held"]["rates"] == found[setting]["plain"]["rates"]
        assert_same(found[setting]["held"]["left"], found[setting]["plain"]["left"])


@pytest.mark.parametrize("setting", SETTINGS)
def test_ranks_train_one_model_and_decide_the_same(setting: Any, ranks: list[Found], assert_same: Any) -> None:
    one, other = (found[setting]["searched"] for found in ranks)
    assert one["shifts"] == other["shifts"]
    assert set(one["shifts"]) == {"learning_rate", "weight_decay"}
    assert one["shifts"]["learning_rate"] > 1  # it was too low
    assert any(t not in (None, 0.0) for t in one["t"])
    assert_same(one["left"][:4], other["left"][:4])


@pytest.mark.parametrize("setting", SETTINGS[1:])
def test_a_point_holds_masters_and_moments_too(setting: Any, ranks: list[Found], assert_same: Any) -> None:
    for found in ranks:
        held, after = found[setting]["went back"]
        assert_same(after, held)


def test_partitioned_or_not_it_learns_the_same(ranks: list[Found]) -> None:
    whole = ranks[0][0, False]["searched"]["shifts"]
    for stage in (1, 2):
        assert ranks[0][stage, False]["searched"]["shifts"] == pytest.approx(whole, rel=1e-3)


def test_a_step_that_deepspeed_skips_is_none(ranks: list[Found]) -> None:
    assert [found["skipped"]["steps"] for found in ranks] == [23, 23]


def test_dropout_is_explored_where_gradients_are_whole(ranks: list[Found]) -> None:
    assert all("dropout" in found["dropout at stage 0"]["shifts"] for found in ranks)


def test_what_cannot_be_had_is_refused_by_stage_and_reason(ranks: list[Found]) -> None:
    for found in ranks:
        assert "ZeRO stage 3, under which no rank holds a whole parameter" in found["refused"]["stage 3"]
        assert "dropout is judged by the gradient of each pass" in found["refused"]["dropout at stage 1"]
