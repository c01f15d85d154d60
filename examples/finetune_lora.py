"""Fine-tuning a causal language model with LoRA in the Transformers Trainer, with or without hdet.

    pip install 'hdet[transformers,peft]'
    python examples/finetune_lora.py --model path/to/a/model --text notes.txt --hdet
    python examples/finetune_lora.py            # a small model made here, on the standard library's own source

The flag adds one line. A third of the held-out pieces are the probe, by which hdet judges; the others say how the
fine-tuned model does.
"""

import argparse
import sysconfig
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset, Subset
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import hdet


class Pieces(Dataset):
    """A text cut into pieces of equal length."""

    def __init__(self, tokens: torch.Tensor, length: int) -> None:
        self.pieces = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def model_and_tokens(folder: str | None, text: str):
    """What lies in a folder, with its tokenizer; without a folder a small model that reads bytes."""
    if folder is None:
        torch.manual_seed(0)
        small = GPT2Config(
            vocab_size=256, n_positions=128, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
        )
        return GPT2LMHeadModel(small), torch.tensor(list(text.encode()))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder), torch.tensor(tokenizer(text)["input_ids"])


def source() -> str:
    """A megabyte or so of the standard library's source."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    return "".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)


def train(
    steps: int, explored: bool, *, folder: str | None = None, text: str | None = None, rate: float = 1e-4
) -> tuple[float, hdet.Search | None]:
    """The held-out loss, in nats per token, and the search."""
    base, tokens = model_and_tokens(folder, text if text is not None else source())
    model = get_peft_model(base, LoraConfig(r=8, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM"))
    pieces = Pieces(tokens, length=64)
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0)).tolist()
    held_out, probe = order[: len(order) // 10], order[len(order) // 10 : len(order) * 3 // 20]
    with tempfile.TemporaryDirectory() as output:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=output,
                per_device_train_batch_size=8,
                gradient_accumulation_steps=2,
                max_steps=steps,
                learning_rate=rate,
                weight_decay=0.01,
                warmup_steps=steps // 10,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Subset(pieces, order[len(order) * 3 // 20 :]),
            eval_dataset=Subset(pieces, held_out[:512]),
        )
        search = hdet.transformers.Search(probe=Subset(pieces, probe))
        if explored:
            trainer.add_callback(search)  # the one new line
        trainer.train()
        return trainer.evaluate()["eval_loss"], search.search


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder that holds a model and its tokenizer")
    parser.add_argument("--text", type=Path, help="a file to fine-tune on")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--hdet", action="store_true")
    options = parser.parse_args()
    loss, search = train(
        options.steps,
        options.hdet,
        folder=options.model,
        text=options.text.read_text(encoding="utf-8") if options.text is not None else None,
        rate=options.rate,
    )
    print(f"held-out loss: {loss:.3f} nats per token")
    for name, learned in (search.shifts if search is not None else {}).items():
        print(f"{name}: {learned.start:.3g} as set, {learned.value:.3g} found")
