"""`hdet.deepspeed.attach` on real engines, two ranks on gloo, ZeRO stages 0 to 3."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import pytest
from two_ranks import found_by

pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="pip install 'hdet[deepspeed]'"),
    pytest.mark.timeout(600),  # one job on two ranks runs for all
]
Found = dict[Any, Any]
SETTINGS = [(0, False), (1, False), (2, False), (3, False), (1, True), (2, True), (3, True)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("deepspeed")
    return found_by("deepspeed_job.py", folder, limit=590)


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


@pytest.mark.parametrize("setting", [(0, False), (2, True), (3, False)])
def test_the_engines_scheduler_is_looked_ahead_at_and_left_as_it_was(
    setting: Any, ranks: list[Found], assert_same: Any
) -> None:
    for found in ranks:
        plain, held = found["scheduled"][setting]
        assert held["foreseen"] == 24
        assert held["rates"] == plain["rates"] == [pytest.approx(0.0, abs=1e-9)] * 2
        assert_same(held["left"], plain["left"])


@pytest.mark.parametrize("stage", [2, 3])
def test_prepared_by_accelerate_it_is_held_bit_for_bit_and_searched(
    stage: int, ranks: list[Found], assert_same: Any
) -> None:
    for found in ranks:
        plain, held, searched = found["accelerated"][stage]
        assert held["steps"] == searched["steps"] == 24
        assert_same(held["left"], plain["left"])
        assert searched["shifts"] == ranks[0]["accelerated"][stage][2]["shifts"]
        assert searched["shifts"]["learning_rate"] > 1


@pytest.mark.parametrize("setting", SETTINGS[1:])
def test_a_point_holds_masters_and_moments_too(setting: Any, ranks: list[Found], assert_same: Any) -> None:
    for found in ranks:
        held, after = found[setting]["went back"]
        assert_same(after, held)


def test_resumed_from_deepspeeds_checkpoint_in_mid_window_it_is_the_same_run(
    ranks: list[Found], assert_same: Any
) -> None:
    for found in ranks:
        for one in found["resumed"]:
            assert_same(one["again"], one["whole"])
            assert one["whole"][1]["learning_rate"] != 1.0


def test_partitioned_or_not_it_learns_the_same(ranks: list[Found]) -> None:
    whole = ranks[0][0, False]["searched"]
    for stage in (1, 2, 3):
        assert ranks[0][stage, False]["searched"]["shifts"] == pytest.approx(whole["shifts"], rel=1e-3)
        assert ranks[0][stage, False]["searched"]["t"] == pytest.approx(whole["t"], rel=1e-3, abs=1e-3)


def test_a_slope_is_the_difference_of_losses_at_weights_put_into_another_model(ranks: list[Found]) -> None:
    for found in ranks:
        for slope, by_hand in found["slopes"].values():
            assert slope == pytest.approx(by_hand, rel=1e-3)
            assert abs(slope) > 1e-4


def test_rates_of_groups_go_to_equal_steps_where_weights_are_whole(ranks: list[Found]) -> None:
    """At stage 3 the model's parameters have no shape between passes, and rates move alike."""
    found = ranks[0]["groups"]
    assert found[2]["ratio"] == pytest.approx(found[0]["ratio"], rel=1e-3)
    assert abs(math.log(found[2]["ratio"])) > 0.05
    assert found[3]["ratio"] is None
    rates = [factor for name, factor in found[3]["shifts"].items() if name.startswith("learning_rate")]
    assert len(rates) > 1
    assert len(set(rates)) == 1


def test_a_step_that_deepspeed_skips_is_none(ranks: list[Found]) -> None:
    assert [found["skipped"]["steps"] for found in ranks] == [23, 23]


def test_dropout_is_explored_where_gradients_are_whole(ranks: list[Found]) -> None:
    assert all("dropout" in found["dropout at stage 0"]["shifts"] for found in ranks)


def test_what_cannot_be_had_is_refused_by_stage_and_reason(ranks: list[Found]) -> None:
    for found in ranks:
        refused = found["refused"]
        assert "is judged by the gradient of each pass, and under ZeRO stage 1" in refused["dropout at stage 1"]
        assert "and under ZeRO stage 3 (DeepSpeedZeroOptimizer_Stage3)" in refused["dropout at stage 3"]
        assert "runs ZeRO stage 3 with offload_param" in refused["parameters offloaded"]
        assert "runs ZeRO stage 3 with zero_hpz_partition_size" in refused["secondary partitions"]
        assert "cuts the optimizer's groups, and under ZeRO stage 1" in refused["rates by patterns"]
        assert (
            "a tail's mean of the weights would be the model's alone, and DeepSpeed's DeepSpeedZero" in refused["tail"]
        )
        assert "keeps master weights apart from the model, in parts on each rank" in refused["given itself"]
        assert "hdet does not know where DeepSpeed's DeepSpeedZeroOptimizer keeps" in refused["unknown"]
        assert "of a part of DeepSpeed's optimizer has" in refused["another part"]
        assert "1 of 2 ranks, and under ZeRO stage 3 hdet reads parameters that" in refused["over fewer ranks"]
        assert refused["moved"].startswith("DeepSpeed has moved")
        assert "to other memory since hdet was attached" in refused["moved"]
