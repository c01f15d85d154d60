"""Accelerate: `hdet.attach` after `prepare`, in a loop as its documentation writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate_job as cases
import pytest
import torch
from accelerate_job import Job
from classified import HELD, STEPS
from launch import launch

import hdet


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("raw", [False, True])
def test_held_it_is_the_loop_without_it_bit_for_bit(raw: bool, precision: str, assert_same: Any) -> None:
    plain = Job(precision=precision).train()
    held = Job(knobs=HELD, raw=raw, precision=precision).train()
    assert held.search is not None
    assert held.search.finished
    assert len(held.search.history) == 5
    assert_same(held.left(), plain.left())


@pytest.mark.parametrize("raw", [False, True])
def test_steps_that_its_gradient_scaler_skips_are_none(raw: bool, assert_same: Any) -> None:
    overflowing = [11, 13, 28]  # the last micro-batch of a step, of the next, and the first of another
    plain = Job(overflowing=overflowing).train()
    held = Job(knobs=HELD, raw=raw, overflowing=overflowing).train()
    assert held.skipped == plain.skipped == [11, 13, 29]
    assert held.search is not None
    assert held.search.engine.step_count == STEPS - len(plain.skipped)
    assert len(held.search.history) == held.search.engine.step_count // 5
    assert_same(held.left(), plain.left())


def test_on_a_cpu_accelerate_leaves_half_precision_out() -> None:
    accelerator = Job(precision="fp16").accelerator
    assert accelerator.scaler is None
    assert not accelerator.native_amp


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: on a CPU Accelerate leaves fp16 out")
def test_on_a_gpu_in_half_precision_held_it_is_the_loop_without_it_bit_for_bit(assert_same: Any) -> None:
    plain = Job(precision="fp16", cpu=False).train()
    held = Job(knobs=HELD, precision="fp16", cpu=False).train()
    assert_same(held.left(), plain.left())


def test_saved_and_loaded_by_accelerate_it_is_the_same_run(tmp_path: Path, assert_same: Any) -> None:
    found = cases.resumed(tmp_path)
    assert_same(found["again"], found["left"])
    assert found["shifts"][0] == found["shifts"][1]
    assert found["shifts"][0]["learning_rate[others]"] != 1.0


def test_two_processes_whose_scheduler_steps_twice_in_ddp_and_sharded(assert_same: Any) -> None:
    for found in launch(cases.held, 2):
        for plain, held, foreseen in found:
            assert foreseen
            assert_same(held, plain)


def test_two_processes_saved_and_loaded_by_accelerate_are_the_same_run(tmp_path: Path, assert_same: Any) -> None:
    found = launch(cases.resumed, 2, tmp_path)
    for each in found:
        assert_same(each["again"], each["left"])
        assert each["shifts"] == [found[0]["shifts"][0]] * 2


def test_another_loop_may_go_on_after_the_search(assert_same: Any) -> None:
    """Detached, the wrapped optimizer and model are as `prepare` made them."""
    job = Job(knobs=[])
    assert isinstance(job.search, hdet.Search)
    job.train(stop=7)
    job.search.detach()
    job.train(7)
    assert job.search.engine.step_count == 7
    assert job.model[2].p == 0.2
