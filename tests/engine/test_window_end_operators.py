"""A window's end works on lists of weights, not on one tensor after another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hdet
from hdet.controllers import Hold


class Many(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(2) for _ in range(count))

    def forward(self) -> Tensor:
        return sum(weight.square().sum() for weight in self.weights)  # type: ignore[return-value]


class Operators(TorchDispatchMode):
    """Counts operators but for views; one on a list counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def operators(tensors: int) -> int:
    """Of the third window's end, with the recipe's evidence and guard; the probe's loss touches no weight."""
    model = Many(tensors)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = hdet.Engine(
        hdet.micro_batches(model, optimizer, 1),
        [
            hdet.LearningRate(evidence=hdet.evidence.Line(read_average_above=None), controller=Hold()),
            hdet.WeightDecay(evidence=hdet.evidence.Analytic(), controller=Hold()),
        ],
        window=2,
        signal=hdet.Probe(lambda model, batch: batch, [torch.ones(()), torch.zeros(())]),
        guard=hdet.Rewind(),
    )
    record = None
    for _ in range(6):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
        with Operators() as seen:
            record = engine.step([torch.ones(())])
    assert record is not None
    return seen.count


def test_more_tensors_take_no_more_operators() -> None:
    assert operators(60) == operators(20)
