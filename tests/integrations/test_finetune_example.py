"""`examples/finetune_lora.py`: on a small model made there, and on one loaded from a folder."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

from tiny import gpt2
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

import hdet

EXAMPLE = Path(hdet.__file__).parent.parent / "examples" / "finetune_lora.py"


def test_a_small_model_is_fine_tuned() -> None:
    train = runpy.run_path(str(EXAMPLE))["train"]
    loss, search = train(12, True)
    assert math.isfinite(loss)
    assert search.finished
    others = {name for name in search.shifts if not name.startswith("learning_rate[")}
    assert others == {"weight_decay", "dropout[0.1]", "dropout[0.05]"}
    assert len(search.shifts) > len(others), "each of the adapter's matrices has a rate"


def test_a_model_is_loaded_from_a_folder(tmp_path: Path) -> None:
    text = "\n".join(f"line {number} of a text to learn" for number in range(3000))
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel()
    tokenizer.train_from_iterator(
        [text], BpeTrainer(vocab_size=256, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    gpt2(n_positions=64).save_pretrained(tmp_path)
    loss, search = runpy.run_path(str(EXAMPLE))["train"](4, False, folder=str(tmp_path), text=text)
    assert math.isfinite(loss)
    assert search is None
