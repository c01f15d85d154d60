"""A run that sets out from another run's model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hdet.app.run import Run, RunConfig
from hdet.app.run.loop import Training
from hdet.errors import ConfigError

SMALL: dict[str, Any] = {
    "task": {"kind": "digits", "width": 8},
    "steps": 4,
    "batch_size": 4,
    "replicas": 2,
    "optimizer": {"lr": 0.01},
    "window": 2,
    "knobs": [],
}


@pytest.fixture
def start(tmp_path: Path) -> str:
    """A pattern that the model of a run with seed 7 lies at."""
    Run(RunConfig.from_dict({**SMALL, "seed": 7}), tmp_path / "digits-7")()
    return str(tmp_path / "{task}-{seed}" / "model.pt")


def models(config: RunConfig) -> list[dict[str, torch.Tensor]]:
    workload = config.task.build(seed=config.seed, batch_size=config.batch_size)
    return [replica.model.state_dict() for replica in Training(config, workload).engine.replicas]


def test_every_replica_sets_out_from_the_checkpoint_of_its_task_and_seed(start: str, tmp_path: Path) -> None:
    kept = torch.load(tmp_path / "digits-7" / "model.pt", weights_only=True)["model"]
    config = RunConfig.from_dict({**SMALL, "seed": 7, "gradients": "local", "start": start})
    for state in models(config):
        assert all(torch.equal(state[name], kept[name]) for name in kept)


def test_the_noise_of_a_warm_start_is_relative_to_the_checkpoint(start: str, tmp_path: Path) -> None:
    kept = torch.load(tmp_path / "digits-7" / "model.pt", weights_only=True)["model"]
    weight = "layers.0.weight"
    first, second = models(RunConfig.from_dict({**SMALL, "seed": 7, "noise": 0.01, "start": start}))
    for state in (first, second):
        moved = (state[weight] - kept[weight]).norm() / kept[weight].norm()
        assert 0.005 < float(moved) < 0.02
    assert not torch.equal(first[weight], second[weight])


def test_plain_training_for_comparison_sets_out_from_it_too(start: str, tmp_path: Path) -> None:
    result = Run(RunConfig.from_dict({**SMALL, "seed": 7, "start": start}), tmp_path / "on")(compare=True)
    assert result.plain is not None
    assert result.plain["test_loss"] == pytest.approx(result.test_loss, rel=1e-6)
    fresh = Run(RunConfig.from_dict({**SMALL, "seed": 7}), tmp_path / "fresh")()
    assert fresh.test_loss != result.test_loss


def test_a_checkpoint_that_is_not_there_is_named(start: str) -> None:
    with pytest.raises(ConfigError, match="digits-8"):
        models(RunConfig.from_dict({**SMALL, "seed": 8, "start": start}))
