"""Tiny language models and their text, made here: nothing is downloaded."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import hdet
from hdet.app.tasks.text import standard_library
from hdet.controllers import Hold
from hdet.spreads import TwoLevel

CONTEXT = 32

ADAPTER_HELD = [
    hdet.LearningRate(controller=Hold()),
    hdet.WeightDecay(controller=Hold()),
    hdet.Dropout(pattern="*.lora_dropout.*", controller=Hold(), spread=TwoLevel(0.0)),
]
"""Of a model with adapters by LoRA, measured as ever and moved nowhere."""


class Text(Dataset):
    """Bytes of the standard library; with `ragged`, some tokens of each example do not count."""

    def __init__(self, split: str, examples: int, *, ragged: bool = False) -> None:
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        data = torch.tensor(standard_library()[split])
        starts = torch.randint(len(data) - CONTEXT, (examples,), generator=generator)
        self.tokens = torch.stack([data[start : start + CONTEXT].long() for start in starts])
        self.counted = torch.randint(CONTEXT // 4, CONTEXT, (examples,), generator=generator) if ragged else None

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self.tokens[index]
        labels = tokens.clone()
        if self.counted is not None:
            labels[int(self.counted[index]) :] = -100
        return {"input_ids": tokens, "labels": labels}


def gpt2(dropout: float = 0.1, n_positions: int = CONTEXT) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=256,
        n_positions=n_positions,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT2LMHeadModel(config)


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "max_steps": 20,
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "logging_steps": 5,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 0,
    }
    return TrainingArguments(output_dir=str(folder), **{**defaults, **options})


def trainer(
    model: Any,
    folder: Path,
    *,
    ragged: bool = False,
    examples: int = 256,
    kind: type[Trainer] = Trainer,
    **options: Any,
) -> Trainer:
    return kind(
        model=model,
        args=arguments(folder, **options),
        train_dataset=Text("train", examples, ragged=ragged),
        eval_dataset=Text("test", 64, ragged=ragged),
    )
