"""`hdet.transformers.Search` in Sentence Transformers' trainer, whose loss compares the pairs of a batch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny  # noqa: F401  nothing is downloaded
import torch
from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import hdet
from hdet.controllers import Hold
from hdet.spreads import TwoLevel

WORDS = [f"w{number}" for number in range(40)]
BATCH = 16


def pairs(count: int, seed: int) -> Dataset:
    """Five words, and three of them backwards."""
    drawn = torch.randint(len(WORDS), (count, 5), generator=torch.Generator().manual_seed(seed)).tolist()
    anchors, positives = [" ".join(WORDS[word] for word in row) for row in drawn], [row[::-1][:3] for row in drawn]
    return Dataset.from_dict(
        {"anchor": anchors, "positive": [" ".join(WORDS[word] for word in row) for row in positives]}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where a small encoder and its tokenizer lie."""
    path = tmp_path_factory.mktemp("encoder")
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(["[PAD]", *WORDS])}, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[PAD]").save_pretrained(path)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(WORDS) + 1, **size)).save_pretrained(path)
    return str(path)


def made(folder: str, out: Path) -> SentenceTransformerTrainer:
    encoder = Transformer(folder)
    model = SentenceTransformer(modules=[encoder, Pooling(encoder.get_embedding_dimension())], device="cpu")
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(out),
        max_steps=30,
        learning_rate=1e-3,
        weight_decay=0.01,
        per_device_train_batch_size=BATCH,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    loss = MultipleNegativesRankingLoss(model)
    return SentenceTransformerTrainer(model=model, args=arguments, train_dataset=pairs(512, seed=0), loss=loss)


def test_held_it_is_the_run_without_it_bit_for_bit(folder: str, tmp_path: Path, assert_same: Any) -> None:
    held = [
        hdet.LearningRate(controller=Hold()),
        hdet.WeightDecay(controller=Hold()),
        hdet.Dropout(controller=Hold(), spread=TwoLevel(0.0)),
    ]
    found = []
    for knobs in (None, held):
        trainer = made(folder, tmp_path)
        if knobs is not None:
            probe = pairs(256, seed=1)
            trainer.add_callback(hdet.transformers.Search(probe=probe, sub_batch_size=BATCH, knobs=knobs, tail=None))
        trainer.train()
        found.append(copy.deepcopy([trainer.model.state_dict(), trainer.optimizer.state_dict()]))
    assert_same(*found)


def test_of_several_data_sets_with_a_loss_each_the_probe_is_of_one(folder: str, tmp_path: Path) -> None:
    trainer = made(folder, tmp_path)
    losses = {name: MultipleNegativesRankingLoss(trainer.model) for name in ("first", "second")}
    sets = DatasetDict(first=pairs(256, seed=0), second=pairs(256, seed=3))
    trainer = SentenceTransformerTrainer(model=trainer.model, args=trainer.args, train_dataset=sets, loss=losses)
    probe = trainer.add_dataset_name_column(pairs(256, seed=1), dataset_name="first")
    search = hdet.transformers.Search(probe=probe, sub_batch_size=BATCH, quiet=True)
    trainer.add_callback(search)
    trainer.train()
    assert search.search.finished


def test_it_is_judged_by_batches_as_large_as_those_of_training(folder: str, tmp_path: Path) -> None:
    """A smaller batch has fewer other pairs to be told from: its loss is lower."""

    def trained(size: int | None) -> None:
        trainer = made(folder, tmp_path)
        callback = hdet.transformers.Search(probe=pairs(256, seed=1), sub_batch_size=size)
        trainer.add_callback(callback)
        trainer.train()
        assert callback.search is not None
        assert callback.search.finished

    with pytest.warns(UserWarning, match="the first training loss is .* where the probe's loss at the same weights is"):
        trained(None)
    trained(BATCH)  # a warning is an error
