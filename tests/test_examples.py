"""Every file in examples/ runs, at a few steps, and does what it says."""

from __future__ import annotations

import json
import math
import pickle
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hdet
from hdet.app.run.config import RunConfig
from hdet.app.study.declaration import Study

sys.path.insert(0, str(Path(__file__).parent / "distributed"))
from launch import launch

EXAMPLES = Path(hdet.__file__).parent.parent / "examples"
STEPS = 60


@pytest.fixture(autouse=True)
def traceless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        yield


def loaded(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / name))


def on_a_rank(name: str) -> dict[str, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: dict[str, float] = loaded(name)["train"](STEPS)
    return found


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("plain_loop.py", {"learning_rate", "weight_decay", "dropout"}),
        ("gradient_accumulation.py", {"learning_rate", "weight_decay", "dropout"}),
        ("own_knob.py", {"learning_rate", "weight_decay", "noise"}),
        ("rates_by_group.py", None),
    ],
)
def test_a_loop_runs_to_its_end_and_its_low_rate_is_raised(name: str, knobs: set[str] | None) -> None:
    search = loaded(name)["train"](STEPS)
    assert search.finished
    assert knobs is None or {knob.partition("[")[0] for knob in search.shifts} == knobs
    raised = [learned.factor for knob, learned in search.shifts.items() if "learning_rate" in knob]
    assert raised
    assert max(factor for factor in raised if factor is not None) > 1 or name == "own_knob.py"


def test_groups_of_rates_are_compared_by_their_steps() -> None:
    search = loaded("rates_by_group.py")["train"](STEPS)
    assert sorted(search.shifts) == ["learning_rate[biases]", "learning_rate[head]", "learning_rate[others]"]
    first = search.history.windows[0].estimates
    ratios = {name: first[name]["step_ratio"] for name in search.shifts}
    assert ratios.pop("learning_rate[biases]") is None
    assert first["learning_rate[biases]"]["rate_ratio"] == pytest.approx(1.0)
    assert min(ratios.values()) < 0.95 < 1.05 < max(ratios.values())


def test_a_small_gpt_trains_with_and_without_hdet() -> None:
    train = loaded("small_gpt.py")["train"]
    assert math.isfinite(train(4, False))
    assert math.isfinite(train(4, True))


def test_a_run_in_two_sittings_is_the_run_in_one(tmp_path: Path) -> None:
    example = loaded("save_and_resume.py")
    (tmp_path / "two").mkdir()
    (tmp_path / "one").mkdir()
    found = example["run"](STEPS, tmp_path / "two")
    whole = example["train"](*example["build"](STEPS, hdet.History(tmp_path / "one" / "history.jsonl")), 0, STEPS)
    assert found.shifts == whole.shifts
    assert list(hdet.History(tmp_path / "two" / "history.jsonl").bases("learning_rate")[:, 0])[-1] == STEPS


def test_a_history_is_read_drawn_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = loaded("save_and_resume.py")
    example["train"](*example["build"](STEPS, hdet.History(tmp_path / "history.jsonl")), 0, STEPS)
    loaded("reading_a_history.py")["read"](tmp_path / "history.jsonl", tmp_path / "report")
    assert "learning_rate[0.weight]: 0.0001 -> " in capsys.readouterr().out
    assert (tmp_path / "report" / "overview.pdf").read_bytes().startswith(b"%PDF")
    assert "<!DOCTYPE html>" in (tmp_path / "report" / "report.html").read_text(encoding="utf-8")


def one_cycle_on_a_rank(spread: float) -> dict[str, float]:
    found: dict[str, float] = loaded("one_cycle.py")["train"](STEPS, spread)
    return found


def test_the_scheduler_in_the_place_of_torchs_explores_on_ranks_alone() -> None:
    plain, explored = (launch(one_cycle_on_a_rank, 2, spread)[0] for spread in (0.0, 0.2))
    assert plain["rate"] == loaded("one_cycle.py")["train"](STEPS)["rate"] != explored["rate"]
    assert math.isfinite(explored["test_loss"])


@pytest.mark.parametrize(("name", "ranks"), [("ddp.py", 2), ("hsdp.py", 4)])
def test_ranks_learn_the_same(name: str, ranks: int) -> None:
    found = launch(on_a_rank, ranks, name)
    assert all(one == found[0] for one in found)
    assert max(value for knob, value in found[0].items() if knob.startswith("learning_rate")) > 1e-4


def batches_of_cifar(folder: Path) -> Path:
    """CIFAR-10 in its own format: small batches of the same keys and types."""
    folder.mkdir()
    numbers = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        labels = numbers.integers(10, size=16)
        images = (labels[:, None] * 25 + numbers.integers(25, size=(16, 3072))).astype(np.uint8)
        batch = {b"batch_label": name.encode(), b"labels": labels.tolist(), b"data": images, b"filenames": [b"x.png"]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return folder


@pytest.mark.parametrize(
    "extra",
    [
        ["--schedule=one_cycle"],
        ["--schedule=cosine", "--hdet", "--window=2"],
        ["--schedule=cosine", "--hdet", "--window=2", "--batch=4"],
    ],
)
def test_cifar_is_read_in_its_own_format_and_trained_on(extra: list[str], tmp_path: Path) -> None:
    example = loaded("cifar_resnet.py")
    given = [str(batches_of_cifar(tmp_path / "cifar")), "--steps=6", "--batch=16", "--blocks=1", "--width=4", *extra]
    found = example["train"](example["arguments"]().parse_args(given))
    assert math.isfinite(found["test_loss"])
    assert 0 <= found["test_error"] <= 1


def test_a_cifar_batch_that_names_other_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_batch").write_bytes(pickle.dumps({b"data": Path("x")}))
    with pytest.raises(pickle.UnpicklingError, match="no part of a CIFAR-10 batch"):
        loaded("cifar_resnet.py")["read"](tmp_path, ["test_batch"])


@pytest.mark.parametrize("extra", [["--schedule=one_cycle"], ["--schedule=cosine", "--hdet", "--window=2"]])
def test_wikitext_is_read_in_its_own_format_and_trained_on(extra: list[str], tmp_path: Path) -> None:
    for split in ("train", "valid", "test"):
        (tmp_path / f"wiki.{split}.tokens").write_text(" \n = A title = \n \n A sentence , of <unk> words . \n" * 9)
    example = loaded("wikitext_gpt.py")
    small = ["--steps=6", "--batch=8", "--context=8", "--width=8", "--depth=1", "--heads=2", *extra]
    options = example["arguments"]().parse_args([str(tmp_path), *small])
    texts, words = example["read"](tmp_path)
    assert words == len({"<eos>", "=", "A", "title", "sentence", ",", "of", "<unk>", "words", "."})
    assert len(texts["test"]) == 9 * 15
    found = example["train"](options)
    assert found["perplexity"] == pytest.approx(math.exp(found["test_loss"]))


@pytest.mark.parametrize("name", ["cifar", "wikitext"])
def test_a_study_of_an_example_names_options_that_it_has(name: str) -> None:
    study = Study.load(EXAMPLES.parent / "studies" / f"{name}.yaml")
    assert study.script is not None
    script = next(Path(word).name for word in study.script if word.endswith(".py"))
    factors = {factor: next(iter(levels.values())) for factor, levels in study.factors.items()}
    words = [word.format(python="python", seed=0, out="out", **factors) for word in study.script]
    options = loaded(script)["arguments"]().parse_args(words[2:])
    assert (options.window, options.micro_batches, options.hdet) == (25, 2, True)


def sharded(folder: str) -> list[tuple[dict[str, float], list[torch.Tensor]]]:
    """In one sitting, in two, and compiled."""
    train = loaded("fsdp2_tp_gpt.py")["train"]
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = train(10, Path(folder) / "one", every=6)
        train(10, Path(folder) / "two", every=6, until=6)
        two = train(10, Path(folder) / "two", every=6)
        compiled = train(10, Path(folder) / "compiled", until=2, backend="aot_eager")
    for search in (one, two, compiled):
        weights = [parameter.detach().full_tensor() for parameter in search.model.parameters()]
        found.append(({name: learned.value for name, learned in search.shifts.items()}, weights))
    return found


def test_sharded_in_two_dimensions_it_goes_on_from_a_distributed_checkpoint(tmp_path: Path, assert_same: Any) -> None:
    ranks = launch(sharded, 4, str(tmp_path), limit=170.0, timeout=120.0)
    one, two, compiled = ranks[0]
    assert [found[0][0] for found in ranks] == [one[0]] * 4
    assert two[0] == one[0]
    assert_same(two[1], one[1])
    assert all(bool(weight.isfinite().all()) for weight in compiled[1])


def test_a_task_of_ones_own_is_trained_by_the_command_from_its_folder(tmp_path: Path) -> None:
    for name in ("own_task.py", "own_task.yaml"):
        (tmp_path / name).write_bytes((EXAMPLES / name).read_bytes())
    command = [sys.executable, "-m", "hdet", "run", "own_task.yaml", "--compare", "--set", "steps=200"]
    subprocess.run([*command, "--set", "task.options.rows=500"], check=True, capture_output=True, timeout=120)
    result = json.loads((tmp_path / "runs" / "own_task" / "result.json").read_text())
    assert result["facts"]["train"] == "500 rows"
    assert result["test_loss"] < result["plain"]["test_loss"]


def test_every_run_in_yaml_is_valid() -> None:
    for path in EXAMPLES.glob("*.yaml"):
        RunConfig.load(path, [])


def test_every_example_is_tested() -> None:
    tests = (Path(__file__), *Path(__file__).parent.glob("integrations/test_*.py"))
    source = "\n".join(path.read_text(encoding="utf-8") for path in tests)
    quoted = set(re.findall(r'"\w+(?:\.py)?"', source))
    assert not [path.name for path in EXAMPLES.glob("*.py") if not {f'"{path.name}"', f'"{path.stem}"'} & quoted]
