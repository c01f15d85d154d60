"""What only an ablation wants."""

from __future__ import annotations

from typing import Any

import torch

import hdet
from hdet.app.study.controls import Apart


def test_replicas_that_are_never_merged_go_on_apart(problem: Any, train: Any) -> None:
    """As in the row "warm start only" of `studies/table1.yaml`: what sets them apart is the first noise alone."""
    model = problem.model()
    replicas = hdet.replicate(model, torch.optim.AdamW(model.parameters(), lr=0.01), n=3)
    hdet.perturb(replicas, noise=0.01)
    engine = hdet.Engine(replicas, [], window=3, total_steps=9, merge=Apart())
    train(engine)
    assert engine.finished
    weights = [replica.model[0].weight for replica in engine.replicas]
    assert not any(torch.equal(weights[0], other) for other in weights[1:])
