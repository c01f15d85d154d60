"""Every file in examples/ runs, at a few steps, and does what it says."""

from __future__ import annotations

import math
import runpy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from hdet.app.run.config import RunConfig

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
    assert knobs is None or set(search.shifts) == knobs
    raised = [learned.factor for knob, learned in search.shifts.items() if "learning_rate" in knob]
    assert raised
    assert max(factor for factor in raised if factor is not None) > 1 or name == "own_knob.py"


def test_rates_are_found_for_each_group_apart() -> None:
    search = loaded("rates_by_group.py")["train"](STEPS)
    assert sorted(search.shifts) == ["learning_rate[biases]", "learning_rate[head]", "learning_rate[others]"]
    last = search.history.windows[4].estimates
    assert len({last[name]["relative"]["slope"] for name in search.shifts}) == 3


def test_a_small_gpt_trains_with_and_without_hdet() -> None:
    train = loaded("small_gpt.py")["train"]
    assert math.isfinite(train(4, False))
    assert math.isfinite(train(4, True))


def test_a_run_in_two_sittings_is_the_run_in_one(tmp_path: Path) -> None:
    example = loaded("save_and_resume.py")
    (tmp_path / "two").mkdir()
    (tmp_path / "one").mkdir()
    found = example["run"](STEPS, tmp_path / "two")
    whole = example["train"](*example["build"](STEPS, tmp_path / "one" / "history.jsonl"), 0, STEPS)
    assert found.shifts == whole.shifts
    assert list(hdet.History(tmp_path / "two" / "history.jsonl").bases("learning_rate")[:, 0])[-1] == STEPS


def test_a_history_is_read_drawn_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = loaded("save_and_resume.py")
    example["train"](*example["build"](STEPS, tmp_path / "history.jsonl"), 0, STEPS)
    loaded("reading_a_history.py")["read"](tmp_path / "history.jsonl", tmp_path / "report")
    assert "learning_rate: 0.0001 -> " in capsys.readouterr().out
    assert (tmp_path / "report" / "overview.pdf").read_bytes().startswith(b"%PDF")
    assert "<!DOCTYPE html>" in (tmp_path / "report" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "ranks"), [("ddp.py", 2), ("hsdp.py", 4)])
def test_ranks_learn_the_same(name: str, ranks: int) -> None:
    found = launch(on_a_rank, ranks, name)
    assert all(one == found[0] for one in found)
    assert found[0]["learning_rate"] > 1e-4


def test_every_run_in_yaml_is_valid() -> None:
    for path in EXAMPLES.glob("*.yaml"):
        RunConfig.load(path, [])


def test_every_example_is_tested() -> None:
    tests = (Path(__file__), *Path(__file__).parent.glob("integrations/test_*.py"))
    source = "\n".join(path.read_text(encoding="utf-8") for path in tests)
    assert not [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in source]
