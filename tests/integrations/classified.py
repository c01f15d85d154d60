"""What the loops of `accelerate_job.py` and `fabric_job.py` train on, and knobs that are held."""

from __future__ import annotations

import torch
from torch import Tensor

import hdet
from hdet.controllers import Hold
from hdet.spreads import TwoLevel

STEPS, PARTS = 24, 2

HELD = [
    hdet.LearningRate(controller=Hold()),
    hdet.WeightDecay(controller=Hold()),
    hdet.Dropout(controller=Hold(), spread=TwoLevel(0.0)),
]
"""Measured as ever and moved nowhere."""


def batch(seed: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs[:, :3].argmax(dim=1)
