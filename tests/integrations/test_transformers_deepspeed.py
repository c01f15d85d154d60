"""`hdet.transformers.Search` in a Trainer that trains by DeepSpeed, on two ranks, ZeRO stages 2 and 3."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
from two_ranks import found_by

pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="pip install 'hdet[deepspeed]'"),
    pytest.mark.timeout(600),  # one job on two ranks runs for all
]
STAGES = (2, 3)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, Any]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("transformers_deepspeed")
    return found_by("transformers_deepspeed_job.py", folder, limit=590)


@pytest.mark.parametrize("stage", STAGES)
def test_held_it_is_the_run_without_it_bit_for_bit(stage: int, ranks: list[dict[int, Any]], assert_same: Any) -> None:
    for found in ranks:
        assert found[stage]["held"]["steps"] == found[stage]["plain"]["steps"] == 12
        assert found[stage]["held"]["foreseen"] == 12  # of the Trainer's own scheduler
        assert_same(found[stage]["held"]["weights"], found[stage]["plain"]["weights"])


@pytest.mark.parametrize("stage", STAGES)
def test_a_resume_in_mid_window_is_the_same_run(stage: int, ranks: list[dict[int, Any]], assert_same: Any) -> None:
    for found in ranks:
        assert_same(found[stage]["resumed"], found[stage]["searched"])
        assert set(found[stage]["searched"]["shifts"]) == {"learning_rate", "weight_decay"}
        assert found[stage]["searched"]["shifts"]["learning_rate"] != 1.0
