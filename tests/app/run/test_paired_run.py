"""`hdet run` with contrasts of pairs: the two of a pair train on the same batch."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

from hdet.app.run import Run, RunConfig
from hdet.app.run.loop import Training

DECLARED = {
    "task": {"kind": "digits", "width": 8, "dropout": 0.2},
    "steps": 3,
    "batch_size": 4,
    "replicas": 4,
    "optimizer": {"lr": 0.01},
    "window": 3,
    "signal": "probe",
    "knobs": [{"kind": "dropout", "evidence": {"kind": "contrast", "paired": True}}],
}


def test_a_pair_takes_the_same_batch(tmp_path: Path) -> None:
    config = RunConfig.from_dict(DECLARED)
    workload = config.task.build(seed=config.seed, batch_size=config.batch_size)
    assert Training(config, workload).engine.data_shards == 2
    taken: list[tuple[int, int]] = []
    kind = type(workload)
    known = kind.batch

    def batch(self: object, step: int, replica: int) -> object:
        taken.append((step, replica))
        return known(self, step, replica)  # type: ignore[arg-type]

    with patch.object(kind, "batch", batch):
        Run(config, tmp_path / "run")()
    assert taken == [(step, part) for step in range(3) for part in (0, 0, 1, 1)]
