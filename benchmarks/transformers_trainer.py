"""A learning rate set wrongly in a Transformers Trainer, with hdet and without it.

A small GPT-2, made here, trains on the bytes of Python's standard library for a given number of steps, by the Trainer's
linear schedule with a warm-up. Printed: the loss on held-out text that neither training nor the probe sees, in nats per
byte.

    python benchmarks/transformers_trainer.py --steps 400
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import hdet
from hdet.app.tasks.text import standard_library

CONTEXT = 64


class Text(Dataset[dict[str, Any]]):
    """Random pieces of one split of the standard library's text."""

    def __init__(self, split: str, examples: int) -> None:
        data = torch.tensor(standard_library()[split])
        generator = torch.Generator().manual_seed(0)
        starts = torch.randint(len(data) - CONTEXT, (examples,), generator=generator)
        self.tokens = torch.stack([data[start : start + CONTEXT].long() for start in starts])

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    )


def run(rate: float, steps: int, warmup: float, explored: bool) -> tuple[float, float, str]:
    """The held-out loss, the seconds it took and what was learned."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=gpt2(),
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=32,
                max_steps=steps,
                learning_rate=rate,
                weight_decay=0.1,
                warmup_steps=int(warmup * steps),
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
            ),
            train_dataset=Text("train", 32 * steps),
            eval_dataset=Text("test", 512),
        )
        callback = hdet.transformers.Search(probe=Text("probe", 2048), quiet=True)
        if explored:
            trainer.add_callback(callback)
        began = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - began
        learned = f"{callback.search.shifts['learning_rate'].value:.2g}" if callback.search is not None else ""
        return trainer.evaluate()["eval_loss"], seconds, learned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--warmup", type=float, default=0.1, help="share of the steps")
    parser.add_argument("--rate", type=float, default=3e-3, help="the well-set one")
    parser.add_argument("--factors", type=float, nargs="+", default=[1 / 30, 1.0, 30.0])
    parser.add_argument("--only", choices=["plain", "hdet"])
    options = parser.parse_args()
    print(f"{'rate':>10} {'run':>6} {'nats/byte':>10} {'seconds':>8} {'rate found':>11}", flush=True)
    for factor in options.factors:
        for explored in (False, True):
            if options.only in (None, "hdet" if explored else "plain"):
                loss, seconds, learned = run(options.rate * factor, options.steps, options.warmup, explored)
                kind = "hdet" if explored else "plain"
                print(f"{options.rate * factor:10.2g} {kind:>6} {loss:10.3f} {seconds:8.1f} {learned:>11}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
