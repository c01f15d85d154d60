"""Replicas that are not there, as torchft's groups that were killed: rows of NaN are no answer of theirs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import hdet
from hdet.merging.outer import OuterMerger
from hdet.replicas import Copies
from hdet.replicas.replicas import present


class Partly(Copies):
    """Replicas in one process, of which the last is never heard of."""

    def gather(self, rows: Tensor) -> NDArray[np.float64]:
        table = super().gather(rows)
        table[-1] = math.nan
        return table


def engine_of(problem: Any, learning_rate: float) -> hdet.Engine:
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    return hdet.Engine(
        Partly(hdet.replicate(model, optimizer, n=3).hosts),
        [],
        window=2,
        gradients="local",
        merge=hdet.merges.Outer(),
        total_steps=6,
    )


def test_a_row_of_nan_is_of_a_replica_that_is_not_there() -> None:
    table = np.array([[1.0, math.nan], [math.nan, math.nan], [math.nan, 0.0]])
    assert present(table).tolist() == [True, False, True]


@pytest.mark.parametrize(("learning_rate", "told"), [(0.0, False), (0.1, True)])
def test_it_does_not_say_that_the_optimizers_step(learning_rate: float, told: bool, problem: Any, train: Any) -> None:
    """A warm-up's first window, at a rate of 0, leaves the question open."""
    engine = engine_of(problem, learning_rate)
    (record,) = train(engine, 2)
    assert {"kind": "absent", "replica": 2, "step": 1} in record.faults
    assert engine.cycle.standstill.done is told


def test_without_it_the_others_still_open_alike(problem: Any) -> None:
    merger = engine_of(problem, 0.1).cycle.merger
    assert isinstance(merger, OuterMerger)
    merger.open_apart()
    assert merger._has_common_origin()
