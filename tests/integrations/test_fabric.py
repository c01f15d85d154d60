"""Lightning Fabric: `hdet.fabric.attach` after `setup`, in a loop as its documentation writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from classified import HELD, STEPS, batch
from fabric_job import Job, loss_of, resumed
from lightning.fabric import Fabric
from torch import nn
from two_ranks import found_by

import hdet
from hdet.controllers import Hold
from hdet.errors import ConfigError
from hdet.evidence import MixedDifference


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("compiled", [False, True])
def test_held_it_is_the_loop_without_it_bit_for_bit(precision: str, compiled: bool, assert_same: Any) -> None:
    plain = Job(precision=precision, compiled=compiled).train()
    held = Job(knobs=HELD, precision=precision, compiled=compiled).train()
    assert held.search is not None
    assert held.search.finished
    assert len(held.search.history) == 5
    assert_same(held.left(), plain.left())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_the_probe_is_judged_in_fabrics_precision(precision: str) -> None:
    """As the wrapped model judges its batches: inputs, the forward pass and outputs are converted as in training."""
    job = Job(knobs=HELD, precision=precision)
    assert job.search is not None
    job.model.eval()
    with torch.no_grad():
        expected = torch.stack([loss_of(job.model, batch(-1 - part)) for part in range(8)])
    measured = job.search.engine.plan.signal.measure(job.model.module, window=0)
    assert measured.tolist() == expected.tolist()
    assert measured.unique().numel() == 8, "in bfloat16 two of them would be one number"


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_an_objective_is_judged_in_fabrics_precision(precision: str) -> None:
    dropout = hdet.Dropout(controller=Hold(), evidence=MixedDifference())
    job = Job(knobs=[*HELD[:2], dropout], precision=precision, objective=hdet.Objective(loss_of, [batch(1), batch(2)]))
    types = set()
    job.model.module[0].register_forward_hook(lambda module, given, output: types.add(output.dtype))
    job.train(stop=5)
    assert types == {torch.bfloat16}


def test_saved_and_loaded_by_fabric_it_is_the_same_run(tmp_path: Path, assert_same: Any) -> None:
    found = resumed(tmp_path)
    assert_same(found["again"], found["left"])
    assert found["shifts"][0] == found["shifts"][1]
    assert found["moved"] != 1.0


@pytest.mark.timeout(300)
def test_two_processes_in_ddp_and_sharded_held_and_resumed(tmp_path: Path, assert_same: Any) -> None:
    first, second = found_by("fabric_job.py", tmp_path, limit=240)
    for found in (first, second):
        for case in ("ddp", "sharded"):
            plain, held = found[case]
            assert_same(held, plain)
        for case in ("resumed", "resumed in parts"):
            assert_same(found[case]["again"], found[case]["left"])
            assert found[case]["shifts"] == [first[case]["shifts"][0]] * 2
            assert found[case]["moved"] != 1.0
        assert found["methods"][0] == found["methods"][1], "as Fabric redirects them"


def test_what_is_not_fabrics_is_told_what_to_call() -> None:
    job = Job()
    probe = hdet.Probe(loss_of, [batch(-1 - part) for part in range(8)])
    with pytest.raises(ConfigError, match=r"wrapped by Lightning Fabric.*call hdet\.fabric\.attach"):
        hdet.attach(job.model, job.optimizer, probe=probe, total_steps=STEPS, scheduler=job.scheduler, quiet=True)
    bare = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3)
    with pytest.raises(ConfigError, match=r"takes the model that fabric\.setup returned .*got a torch\.nn.*Linear"):
        hdet.fabric.attach(job.fabric, bare, optimizer, probe=probe, total_steps=9)
    compiled: Any = torch.compile(job.model)
    with pytest.raises(ConfigError, match=r"compiled before that, if it is\), got a torch\._dynamo"):
        hdet.fabric.attach(job.fabric, compiled, job.optimizer, probe=probe, total_steps=9)
    with pytest.raises(ConfigError, match=r"fabric must be a lightning\.Fabric, got Sequential"):
        hdet.fabric.attach(nn.Sequential(), job.model, job.optimizer, probe=probe, total_steps=9)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"probe must be an hdet\.Probe, got list"):
        hdet.fabric.attach(job.fabric, job.model, job.optimizer, probe=[batch(0)], total_steps=9)  # type: ignore[arg-type]


def test_the_fabric_of_the_package_beside_it_is_named() -> None:
    """pytorch_lightning brings its own."""
    beside = pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", devices=1)
    bare = nn.Sequential(nn.Linear(4, 3))
    model, optimizer = beside.setup(bare, torch.optim.AdamW(bare.parameters(), lr=1e-3))
    probe = hdet.Probe(loss_of, [batch(0), batch(1)])
    with pytest.raises(ConfigError, match=r"wrapped by Lightning Fabric.*call hdet\.fabric\.attach"):
        hdet.attach(model, optimizer, probe=probe, total_steps=9, quiet=True)
    with pytest.raises(ConfigError, match=r"takes the model that fabric\.setup returned .*got a lightning_fabric\."):
        hdet.fabric.attach(Job().fabric, model, optimizer, probe=probe, total_steps=9)


def test_under_deepspeed_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.fabric.strategies import DeepSpeedStrategy

    job = Job()
    monkeypatch.setattr(Fabric, "strategy", property(lambda fabric: object.__new__(DeepSpeedStrategy)))
    with pytest.raises(ConfigError, match="under Fabric's DeepSpeedStrategy hdet is not tried"):
        hdet.fabric.attach(job.fabric, job.model, job.optimizer, probe=hdet.Probe(loss_of, [batch(0), batch(1)]))
