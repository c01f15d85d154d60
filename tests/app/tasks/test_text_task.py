"""The text task: splits by file, pure batches, and a model whose scalars can be knobs."""

from __future__ import annotations

import math
import sysconfig
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch

import hdet
from hdet.app.tasks import Text, Workload
from hdet.app.tasks.text import TextWorkload, standard_library
from hdet.errors import ConfigError

SMALL = Text(width=16, depth=2, heads=2, context=16, dropout=0.2, test_sequences=32)


@pytest.fixture(scope="module")
def workload() -> TextWorkload:
    return SMALL.build(seed=3, batch_size=4)


def test_it_is_a_workload(workload: TextWorkload) -> None:
    assert isinstance(workload, Workload)


def test_every_file_falls_into_exactly_one_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(300):
        (tmp_path / f"package_{index % 7}").mkdir(exist_ok=True)
        (tmp_path / f"package_{index % 7}" / f"module_{index}.py").write_text(f"<{index}>")
    for skipped in ("site-packages", "dist-packages"):
        (tmp_path / skipped).mkdir()
        (tmp_path / skipped / "foreign.py").write_text("foreign")
    (tmp_path / "data.txt").write_text("foreign")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    standard_library.cache_clear()
    try:
        found = standard_library()
    finally:
        standard_library.cache_clear()
    texts = {name: bytes(data).decode() for name, data in found.items()}
    assert sorted("".join(texts.values()).strip("<>").split("><"), key=int) == [str(i) for i in range(300)]
    shares = {name: text.count("<") / 300 for name, text in texts.items()}
    assert shares["train"] > 0.8
    assert 0.01 < shares["probe"] < 0.12
    assert 0.01 < shares["test"] < 0.12


def test_a_python_without_its_library_as_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    standard_library.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"full Python installation.*imported"):
            standard_library()
    finally:
        standard_library.cache_clear()


def test_the_facts_name_size_and_hash_of_each_split(workload: TextWorkload) -> None:
    for name, data in workload.splits.items():
        assert workload.facts[name] == f"{len(data):,} bytes, sha256 {sha256(bytes(data)).hexdigest()}"


def test_a_batch_is_a_pure_function_and_replicas_see_different_ones(workload: TextWorkload) -> None:
    again = SMALL.build(seed=3, batch_size=4)
    assert torch.equal(workload.batch(5, 2), again.batch(5, 2))
    assert workload.batch(5, 2).shape == (4, 17)
    seen = {bytes(workload.batch(s, r).numpy().astype(np.uint8)) for s in range(4) for r in range(4)}
    assert len(seen) == 16
    assert not torch.equal(workload.batch(0, 0), SMALL.build(seed=4, batch_size=4).batch(0, 0))


def test_a_sequence_is_text_of_its_split(workload: TextWorkload) -> None:
    sequence = bytes(workload.batch(0, 0)[0].numpy().astype(np.uint8))
    assert sequence in bytes(workload.splits["train"])


def test_train_bytes_makes_the_data_repeat() -> None:
    limited = SMALL.replace(train_bytes=40).build(seed=3, batch_size=64)
    assert len(limited.splits["train"]) == 40
    assert len({tuple(row) for row in limited.batch(0, 0).tolist()}) <= 40 - 16
    assert len(limited.splits["probe"]) > 1000


def test_too_little_text_for_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="16 bytes, too few for context=16"):
        SMALL.replace(train_bytes=16).build(seed=0, batch_size=1)


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ConfigError, match="5 does not divide 64"):
        Text(heads=5)


def test_probes_are_held_out_fresh_by_window_and_in_equal_parts(workload: TextWorkload) -> None:
    parts = workload.probe(0)
    assert [tuple(part.shape) for part in parts] == [(8, 17)] * 8
    assert all(torch.equal(one, two) for one, two in zip(parts, workload.probe(0), strict=True))
    assert not torch.equal(parts[0], workload.probe(1)[0])
    assert bytes(parts[0][0].numpy().astype(np.uint8)) in bytes(workload.splits["probe"])


def test_the_model_is_the_same_at_each_call_and_leaves_the_global_generator_alone(workload: TextWorkload) -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    one, two = workload.model(), workload.model()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12)
    three = workload.model()
    other = SMALL.build(seed=4, batch_size=4).model()
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, two.get_parameter(name))
        assert torch.equal(parameter, three.get_parameter(name))
    assert not torch.equal(one.embedding.weight, other.embedding.weight)


def test_residual_projections_start_smaller(workload: TextWorkload) -> None:
    model = Text(width=64, depth=8).build(seed=0, batch_size=1).model()
    assert model.blocks[0].attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)  # type: ignore[union-attr]
    assert model.blocks[0].attention.out.weight.std().item() == pytest.approx(0.005, rel=0.05)  # type: ignore[union-attr]
    assert model.blocks[0].mlp[2].weight.std().item() == pytest.approx(0.005, rel=0.05)  # type: ignore[index]


def test_the_head_is_the_embedding_and_groups_hold_each_parameter_once(workload: TextWorkload) -> None:
    model = workload.model()
    assert model.head.weight is model.embedding.weight
    decay, no_decay = workload.groups(model)
    assert (decay["name"], no_decay["name"]) == ("decay", "no_decay")
    held = [id(p) for p in (*decay["params"], *no_decay["params"])]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    assert "weight_decay" not in decay
    assert no_decay["weight_decay"] == 0.0
    assert all(p.dim() < 2 for p in no_decay["params"])


def test_no_byte_sees_the_future(workload: TextWorkload) -> None:
    model = workload.model().eval()
    tokens = workload.batch(0, 0)[:, :-1]
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    one, two = model(tokens), model(changed)
    assert torch.equal(one[:, :9], two[:, :9])
    assert not torch.equal(one[:, 9:], two[:, 9:])


def test_evaluation_is_free_of_dropout_and_label_smoothing(workload: TextWorkload) -> None:
    model, batch = workload.model(), workload.batch(0, 0)
    smoothed = workload.model()
    smoothed.criterion.label_smoothing = 0.5
    assert workload.loss(model, batch) != workload.loss(model, batch), "dropout is not on in training"
    assert torch.equal(workload.loss(model.eval(), batch), workload.loss(smoothed.eval(), batch))


def test_the_test_loss_is_a_fixed_number_and_leaves_the_model_as_it_was(workload: TextWorkload) -> None:
    model = workload.model()
    state = torch.get_rng_state()
    first = workload.test_loss(model)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert first == workload.test_loss(model.eval())
    assert not model.training
    assert first == SMALL.build(seed=99, batch_size=1).test_loss(model), "the test set must not follow the seed"
    assert first == pytest.approx(math.log(256), abs=0.1), "an untrained model knows nothing"


def test_attention_temperature_reaches_the_logits(workload: TextWorkload) -> None:
    model = workload.model().eval()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight.mul_(50.0)  # type: ignore[union-attr, operator]
    batch = workload.batch(0, 0)
    cold = workload.loss(model, batch)
    for block in model.blocks:
        block.attention.temperature.temperature = 100.0  # type: ignore[union-attr]
    assert abs(float((workload.loss(model, batch) - cold).detach())) > 1e-5


@pytest.mark.parametrize(
    "knob",
    [
        hdet.LearningRate(),
        hdet.LearningRate(groups="no_decay"),
        hdet.WeightDecay(),
        hdet.Dropout(),
        hdet.AttentionTemperature(),
        hdet.LabelSmoothing(schedule=0.1),
    ],
)
def test_every_knob_finds_its_scalar(workload: TextWorkload, knob: hdet.Knob) -> None:
    model = workload.model()
    optimizer = torch.optim.AdamW(workload.groups(model), lr=1e-3, weight_decay=0.1)
    binding = knob.bind(model, optimizer)
    binding.write(0.25)
    assert binding.read() == 0.25


def test_it_learns(workload: TextWorkload) -> None:
    model = workload.model()
    optimizer = torch.optim.AdamW(workload.groups(model), lr=1e-2)
    for step in range(40):
        workload.loss(model, workload.batch(step, 0)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    assert workload.test_loss(model) < 4.0 < math.log(256)
