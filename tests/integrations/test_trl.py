"""`hdet.transformers.Search` in TRL's trainers: their data sets, their losses, the metrics they gather."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny import ADAPTER_HELD, CONTEXT, Text, gpt2
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import hdet
from hdet.app.tasks.text import standard_library
from hdet.errors import ConfigError

LORA = LoraConfig(r=4, lora_dropout=0.05, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")


def texts(split: str, examples: int, length: int = 24) -> list[str]:
    data = standard_library()[split][: examples * length].tobytes().decode("ascii", "replace")
    return [data[start : start + length] for start in range(0, examples * length, length)]


def lines(split: str, examples: int) -> Dataset:
    return Dataset.from_dict({"text": texts(split, examples)})


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(BPE())
    made.pre_tokenizer = ByteLevel()
    alphabet = ByteLevel.alphabet()
    made.train_from_iterator([], BpeTrainer(special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<eos>")


def options(folder: Path, **given: Any) -> dict[str, Any]:
    common: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 20,
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "per_device_train_batch_size": 8,
        "logging_steps": 5,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
    }
    return common | given


def sft(folder: Path, tokenizer: PreTrainedTokenizerFast, **given: Any) -> SFTTrainer:
    torch.manual_seed(1)
    return SFTTrainer(
        model=gpt2(),
        args=SFTConfig(max_length=CONTEXT, **options(folder, **given)),
        train_dataset=lines("train", 256),
        eval_dataset={"eval": lines("test", 64), "probe": lines("probe", 64)},
        processing_class=tokenizer,
        peft_config=LORA,
    )


def ended(made: SFTTrainer) -> list[Any]:
    """Weights, optimizer and the metrics that the trainer has gathered itself, without its speed."""
    logs = [
        {name: value for name, value in entry.items() if "runtime" not in name and "per_second" not in name}
        for entry in made.state.log_history
        if not any(name.startswith("hdet/") for name in entry)
    ]
    return copy.deepcopy([made.model.state_dict(), made.optimizer.state_dict(), logs])


def test_held_it_is_the_run_without_it_bit_for_bit(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, assert_same: Any
) -> None:
    found = []
    for knobs in (None, ADAPTER_HELD):
        made = sft(tmp_path, tokenizer, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=10)
        probe = made.eval_dataset.pop("probe")
        if knobs is not None:
            made.add_callback(hdet.transformers.Search(probe=probe, knobs=knobs, tail=None))
        made.train()
        found.append(ended(made))
    assert_same(*found)
    assert sum("mean_token_accuracy" in entry for entry in found[0][2]) == 4
    assert sum("eval_mean_token_accuracy" in entry for entry in found[0][2]) == 2


def test_a_resume_is_the_same_run_bit_for_bit(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, assert_same: Any
) -> None:
    runs = []
    for folder in (None, str(tmp_path / "checkpoint-7")):
        made = sft(tmp_path, tokenizer, gradient_accumulation_steps=2, save_strategy="steps", save_steps=7)
        callback = hdet.transformers.Search(probe="probe")
        made.add_callback(callback)
        made.train(resume_from_checkpoint=folder)
        assert callback.search is not None
        assert callback.search.finished
        runs.append(ended(made)[:2])
    assert_same(*runs)


def test_data_that_it_has_not_prepared_are_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    made = sft(tmp_path, tokenizer)
    made.add_callback(hdet.transformers.Search(probe=lines("probe", 16)))
    with pytest.raises(ConfigError, match="cannot make a batch of the probe's data"):
        made.train()


def test_a_loss_that_rises_as_the_model_gets_better_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    probe = [{"input_ids": batch, "labels": batch} for batch in Text("probe", 32).tokens.split(8)]
    mean = hdet.Probe(lambda model, batch: model(**batch).loss, probe)
    for objective in (None, "probe"):
        made = sft(tmp_path, tokenizer, loss_type="dft")
        made.add_callback(hdet.transformers.Search(probe=mean if objective else "probe", objective=objective))
        with pytest.raises(ConfigError, match="weighs each token by its own probability"):
            made.train()
    made = sft(tmp_path, tokenizer, loss_type="dft")
    callback = hdet.transformers.Search(probe=mean)
    made.add_callback(callback)
    with pytest.warns(UserWarning, match="they are on different scales"):
        made.train()
    assert callback.search is not None
    assert callback.search.finished
    first, *_, last = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert last > first


def preferences(split: str, examples: int) -> Dataset:
    """Each line goes on as it does, rather than backwards."""
    found = texts(split, examples)
    return Dataset.from_list([{"prompt": one[:8], "chosen": one[8:16], "rejected": one[15:7:-1]} for one in found])


def test_preferences_are_searched(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    gpt2().save_pretrained(tmp_path / "model")
    made = DPOTrainer(
        model=str(tmp_path / "model"),
        args=DPOConfig(max_length=CONTEXT, **options(tmp_path, max_steps=30)),
        train_dataset=preferences("train", 128),
        eval_dataset=preferences("test", 64),
        processing_class=tokenizer,
        peft_config=LORA,
    )
    callback = hdet.transformers.Search(probe=made.eval_dataset)
    made.add_callback(callback)
    made.train()
    assert callback.search is not None
    assert callback.search.finished
    rates = [name for name in callback.search.shifts if name.startswith("learning_rate[")]
    assert any(record.estimates[name]["t"] != 0.0 for record in callback.search.history for name in rates)


def test_rewards_are_judged_by_a_probe_of_ones_own(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = Dataset.from_dict({"prompt": texts("train", 64, length=8)})
    sentences = torch.tensor([ids[:20] for ids in tokenizer(texts("probe", 64))["input_ids"]])

    def made(probe: Any, objective: Any = None) -> tuple[GRPOTrainer, hdet.transformers.Search]:
        trainer = GRPOTrainer(
            model=gpt2(),
            args=GRPOConfig(max_completion_length=8, num_generations=4, **options(tmp_path, max_steps=12)),
            reward_funcs=lambda completions, **_: [float(text.count("e")) for text in completions],
            train_dataset=prompts,
            eval_dataset=prompts,
            processing_class=tokenizer,
        )
        callback = hdet.transformers.Search(probe=probe, objective=objective)
        trainer.add_callback(callback)
        return trainer, callback

    judge = hdet.Probe(lambda model, batch: model(batch, labels=batch).loss, list(sentences.split(8)))

    with pytest.raises(ConfigError, match="GRPOTrainer learns from rewards of what the model generates"):
        made(prompts)[0].train()
    with pytest.raises(ConfigError, match="GRPOTrainer learns from rewards of what the model generates"):
        made(judge, objective=prompts)[0].train()
    trainer, callback = made(judge)
    trainer.train()
    assert callback.search is not None
    assert callback.search.finished
