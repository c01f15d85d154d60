"""A probe that cannot be read is noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hdet


def test_a_sub_batch_that_is_never_finite_is_named(problem: Any, train: Any) -> None:
    held_out = [problem.batch(-1, j) for j in range(4)]
    held_out[2] = tuple(torch.full_like(part, float("nan")) for part in held_out[2])
    model = problem.model()
    engine = hdet.Engine(
        hdet.micro_batches(model, torch.optim.SGD(model.parameters(), lr=0.01), 1),
        [hdet.LearningRate(evidence=hdet.evidence.Line())],
        window=3,
        signal=hdet.Probe(problem.loss, held_out),
        total_steps=9,
    )
    with pytest.warns(UserWarning, match=r"not finite on sub-batches \[2\] of 4"):
        records = train(engine)
    assert records[0].estimates["learning_rate"]["stderr"] == float("inf")
