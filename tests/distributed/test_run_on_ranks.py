"""`hdet run` on several ranks of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launch import free_port, start
from training import batch, difference, loss_of, network, optimizer_of, train

import hdet
from hdet.app.run import Run, RunConfig, launching

DECLARED = """
task: {kind: text, width: 8, depth: 1, heads: 1, context: 8, test_sequences: 64}
steps: 12
batch_size: 8
replicas: 4
optimizer: {kind: adamw, lr: 1.0e-3}
window: 4
knobs:
  - {kind: learning_rate, evidence: divergent, controller: gated}
  - {kind: weight_decay, evidence: divergent, controller: gated}
"""


def hdet_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hdet", "run", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture(scope="module")
def declared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("declared") / "run.yaml"
    path.write_text(DECLARED)
    return path


def become(rank: int, ranks: int, port: int) -> None:
    """What torchrun does."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def as_a_rank(rank: int, ranks: int, port: int, declared: Path, folder: Path) -> None:
    """What `hdet run` does under torchrun."""
    become(rank, ranks, port)
    with launching.ranks("cpu"):
        Run(RunConfig.load(declared), folder)()


def as_on_the_page(rank: int, ranks: int, port: int, code: str) -> None:
    """The page's script under torchrun."""
    become(rank, ranks, port)
    batches = [batch(step, rank) for step in range(201)][:200]
    names = {"build_model": network, "loss_fn": loss_of, "batches": batches, "__name__": "page"}
    exec(compile(code, "docs/distributed.md", "exec"), names)
    assert len(names["engine"].history) == 2  # type: ignore[attr-defined]


def given_afterwards(rank: int, ranks: int, port: int, path: Path) -> None:
    """A history that is set, and not given as the engine is made."""
    become(rank, ranks, port)
    with launching.ranks("cpu"):
        model = network()
        replicas = hdet.distribute(model, optimizer_of(model))
        engine = hdet.Engine(replicas, [hdet.LearningRate()], window=2, gradients="local", total_steps=4)
        engine.history = hdet.History(path)
        train(engine, 4)


def test_one_rank_writes_a_history_that_is_set_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    processes = start(given_afterwards, 2, free_port(), path)
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert [record.window for record in hdet.History(path)] == [0, 1]


def test_the_five_changed_places_of_the_page_train_on_two_ranks() -> None:
    page = (Path(hdet.__file__).parent.parent / "docs" / "distributed.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    assert sum(f"# {number}" in code for number in range(1, 6)) == 5
    processes = start(as_on_the_page, 2, free_port(), code)
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0]


def test_processes_share_the_replicas_and_come_to_the_same_result(declared: Path, tmp_path: Path) -> None:
    ended = hdet_run(str(declared), "--replicas", "2", "--processes", "2", "--out", str(tmp_path / "ranks"))
    assert ended.returncode == 0, ended.stderr
    assert "with hdet" in ended.stdout
    assert ended.stdout.count("written to") == 1  # one rank speaks

    torch.set_num_threads(1)
    Run(RunConfig.load(declared, ["replicas=2"]), tmp_path / "one")()
    ours, theirs = (hdet.History(tmp_path / name / "history.jsonl") for name in ("ranks", "one"))
    assert len(ours) == len(theirs) == 3
    for found, expected in zip(ours, theirs, strict=True):
        assert (found.bases, found.values, found.losses) == (expected.bases, expected.values, expected.losses)
        assert (found.estimates, found.moves) == (expected.estimates, expected.moves)
    models = [torch.load(tmp_path / name / "model.pt", weights_only=True)["model"] for name in ("ranks", "one")]
    assert difference(list(models[0].values()), list(models[1].values())) == 0.0
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("ranks", "one")]
    assert results[0]["test_loss"] == results[1]["test_loss"]


def test_several_replicas_on_each_process_explore_the_same_designs(declared: Path, tmp_path: Path) -> None:
    processes = start(as_a_rank, 2, free_port(), declared, tmp_path / "ranks")
    for process in processes:
        process.join(timeout=100)
    assert [process.exitcode for process in processes] == [0, 0]
    torch.set_num_threads(1)
    Run(RunConfig.load(declared), tmp_path / "one")()
    ours, theirs = (hdet.History(tmp_path / name / "history.jsonl") for name in ("ranks", "one"))
    assert len(ours) == len(theirs) == 3
    # Losses agree up to the order of sums, and what they move does; until then all is exact.
    assert (ours.windows[0].bases, ours.windows[0].values) == (theirs.windows[0].bases, theirs.windows[0].values)
    for found, expected in zip(ours, theirs, strict=True):
        assert found.losses == pytest.approx(expected.losses, rel=1e-4)
        assert found.bases == pytest.approx(expected.bases, rel=1e-3)
        for name, values in found.values.items():
            order = sorted(range(4), key=values.__getitem__)
            assert order == sorted(range(4), key=expected.values[name].__getitem__)


def test_replicas_that_cannot_be_shared_out_are_refused(declared: Path, tmp_path: Path) -> None:
    ended = hdet_run(str(declared), "--replicas", "3", "--processes", "2", "--out", str(tmp_path / "odd"))
    assert ended.returncode == 2
    assert "3 replicas cannot be shared out evenly over 2 processes" in ended.stderr
    assert not (tmp_path / "odd").exists()
