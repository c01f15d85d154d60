"""LoRA by PEFT in the Trainer: the base model frozen, dropouts of several rates."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import ADAPTER_HELD, gpt2, trainer

import hdet


def lora() -> PeftModel:
    config = LoraConfig(r=4, lora_dropout=0.05, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return get_peft_model(gpt2(), config)


def test_dropouts_of_base_and_adapter_are_found_and_the_base_stays(tmp_path: Path, assert_same: Any) -> None:
    model = lora()
    base = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    made = trainer(model, tmp_path, max_steps=30, gradient_accumulation_steps=4, save_strategy="steps", save_steps=30)
    callback = hdet.transformers.Search(probe=made.eval_dataset)
    made.add_callback(callback)
    made.train()
    assert callback.search is not None
    starts = {name: shift.start for name, shift in callback.search.shifts.items()}
    rates = {starts.pop(name) for name in list(starts) if name.startswith("learning_rate[")}
    assert rates == {3e-3}
    assert starts == pytest.approx({"weight_decay": 0.1, "dropout[0.1]": 0.1, "dropout[0.05]": 0.05})
    judged = [record.estimates["dropout[0.05]"]["t"] for record in callback.search.history]
    assert any(t != 0.0 for t in judged)
    assert_same(base, {name: p for name, p in model.named_parameters() if not p.requires_grad})


def test_held_it_is_the_run_without_it_bit_for_bit(tmp_path: Path, assert_same: Any) -> None:
    found = []
    for knobs in (None, ADAPTER_HELD):
        made = trainer(lora(), tmp_path, gradient_accumulation_steps=2)
        if knobs is not None:
            made.add_callback(hdet.transformers.Search(probe=made.eval_dataset, knobs=knobs))
        made.train()
        found.append(copy.deepcopy([made.model.state_dict(), made.optimizer.state_dict()]))
    assert_same(*found)


def test_a_resume_is_the_same_run_bit_for_bit(tmp_path: Path, assert_same: Any) -> None:
    options = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 7}
    runs = []
    for folder in (None, str(tmp_path / "checkpoint-7")):
        made = trainer(lora(), tmp_path, **options)
        made.add_callback(hdet.transformers.Search(probe=made.eval_dataset))
        made.train(resume_from_checkpoint=folder)
        runs.append(copy.deepcopy([made.model.state_dict(), made.optimizer.state_dict()]))
    assert_same(*runs)
