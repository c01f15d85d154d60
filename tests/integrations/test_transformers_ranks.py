"""`hdet.transformers.Search` where torchrun starts a Trainer on two ranks, in DDP and sharded by FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
from two_ranks import found_by


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found, by how the model is spread over them."""
    folder = tmp_path_factory.mktemp("ranks")
    found = found_by("transformers_job.py", folder, limit=170)
    for name in ("ddp", "fsdp2"):
        assert (folder / name / "searched" / "checkpoint-9" / "hdet.pt").exists()
    return found


@pytest.fixture(params=["ddp", "fsdp2"])
def ranks(request: pytest.FixtureRequest, both: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [found[request.param] for found in both]


def test_ranks_train_one_model_and_decide_the_same(ranks: list[dict[str, Any]], assert_same: Any) -> None:
    one, other = ranks
    for name in one:
        assert_same(one[name]["weights"], other[name]["weights"])
        assert one[name]["shifts"] == other[name]["shifts"]


def test_each_rank_has_the_micro_batches_of_a_process(both: list[dict[str, Any]]) -> None:
    assert [found["ddp"]["searched"]["replicas"] for found in both] == [0, 2]
    assert [found["fsdp2"][run]["sharded"] for found in both for run in found["fsdp2"]] == 8 * [True]


def test_dropout_is_explored_of_shards_too(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "dropout" in found["searched"]["shifts"]


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
