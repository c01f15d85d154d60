"""Lightning over two real processes, in DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning_ranks as cases
from launch import launch


def test_held_it_is_the_distributed_run_without_it_bit_for_bit(tmp_path: Path, assert_same: Any) -> None:
    for plain, held, windows in launch(cases.held, 2, tmp_path):
        assert windows >= 1
        assert_same(held, plain)


def test_ranks_agree_and_a_resume_is_the_same_run(tmp_path: Path, assert_same: Any) -> None:
    found = launch(cases.explored_and_resumed, 2, tmp_path)
    assert found[0]["replicas"] == 4  # 2 ranks of 2 micro-batches
    assert found[0]["factors"] == found[1]["factors"]
    assert found[0]["factors"] == found[0]["factors again"]
    assert found[0]["factors"]["learning_rate[others]"] != 1.0
    assert_same(found[0]["states"], found[1]["states"])
    for each in found:
        assert_same(each["resumed"], each["states"])


def test_fully_sharded_held_it_is_the_run_without_it_and_a_resume_is_the_same_run(
    tmp_path: Path, assert_same: Any
) -> None:
    found = launch(cases.sharded, 2, tmp_path)
    assert found[0]["factors"]["learning_rate"] != 1.0
    for each in found:
        assert each["windows"] >= 1
        assert_same(each["held"], each["plain"])
        assert_same(each["searched"], found[0]["searched"])
        assert_same(each["resumed"], each["searched"])
        assert each["factors"] == each["factors again"] == found[0]["factors"]
