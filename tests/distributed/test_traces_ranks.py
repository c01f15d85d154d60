"""What is remembered of gradients on several ranks, where one rank's passes were all left out: real processes."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from launch import launch
from torch import nn

import hdet
from hdet.evidence.parts.gradient_memory import Traces

STEPS, WIDTH = 40, 3


def left_out(rank: int | None) -> list[float]:
    """Slope and standard error at a window's end; the passes of one rank were all left out."""
    model = nn.Linear(WIDTH, 1, bias=False)
    replicas = hdet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batches=2)
    traces = Traces(replicas, knobs=1, block_steps=2, horizon=100, groups=4)
    signs = np.array([[1.0], [-1.0], [1.0], [-1.0]])
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        gradients = torch.randn(4, WIDTH, generator=generator) + torch.tensor([[1.0], [0.0], [1.0], [0.0]])
        for replica in replicas.local:
            if dist.get_rank() == rank:
                traces.reject(replica)
            else:
                traces.add(replica, gradients[replica.index], signs, [0.1])
        traces.end_step(step, signs, step + 1 == STEPS)
    found = traces.close([0], [0.1], lambda: torch.ones(WIDTH))
    return [found[0].slope, found[0].stderr] if found else []


def test_a_rank_whose_passes_were_all_left_out_is_waited_for_and_adds_nothing() -> None:
    first, second = launch(left_out, 2, 1)
    assert first == second
    whole, _ = launch(left_out, 2, None)
    for slope, error in (first, whole):
        assert error > 0.0
        assert abs(slope - whole[0]) < 4 * (error + whole[1])
