"""DistributedDataParallel broadcasts parameters and buffers from rank 0, and must leave knobs alone."""

from __future__ import annotations

import torch
import torch.distributed as dist
from launch import launch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hdet.nn import knob_tensors, swap


def trained() -> tuple[list[str], set[float], set[float], Tensor]:
    """Names of the dropouts; values of all knobs and what their tensors hold; the first layer's weights."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.BatchNorm1d(4),
        nn.Dropout(0.1),
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True),
    )
    swap(model)
    for role in ("dropout", "temperature"):
        for knob in knob_tensors(model, role).values():
            knob.fill_(0.2 + 0.3 * rank)
    wrapped = DistributedDataParallel(model)
    # BatchNorm's buffers make each forward broadcast from rank 0.
    for _ in range(2):
        wrapped(torch.randn(3, 4)).square().sum().backward()
    names = list(knob_tensors(wrapped, "dropout"))
    knobs = [knob for role in ("dropout", "temperature") for knob in knob_tensors(wrapped, role).values()]
    values = {knob.value for knob in knobs}
    return names, values, {round(knob.tensor.item(), 6) for knob in knobs}, model[0].weight.detach()


def test_knobs_differ_over_ranks_after_construction_and_training() -> None:
    first, second = launch(trained, 2)
    assert first[0] == second[0] == ["2.p", "3.self_attn.dropout", "3.dropout.p", "3.dropout1.p", "3.dropout2.p"]
    assert first[1:3] == ({0.2}, {0.2})
    assert second[1:3] == ({0.5}, {0.5})
    assert torch.equal(first[3], second[3])
