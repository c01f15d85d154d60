"""What the tests of Contrast train: a loss that is linear in three weights, so that slopes are exact."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import explicit_loop
import pytest
import torch
from torch import Tensor, nn

import hdet
import hdet.testing
from hdet import Engine, Probe
from hdet.controllers import Hold
from hdet.evidence import Contrast
from hdet.hparams.forward import ModuleKnob
from hdet.spaces import Arcsine, Space
from hdet.spreads import TwoLevel

RATE, WIDTH, SCALE = 0.1, 0.2, 1.5
SLOPE = torch.tensor([1.0, -2.0, 0.5])
AIM = torch.tensor([2.0, 1.0, 3.0])
STANDS_STILL = pytest.mark.filterwarnings("ignore:no weight of replica")
"""Weights that no step, or none worth the name, moves."""


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([3.0, 1.0, -2.0]))
        self.a = SCALE
        self.b = 0.7
        self.idle = 0.5
        self.rate = 0.0
        self.late = 0.0
        self.norm = nn.Identity()


def scaled(model: Any, step: int = 0, index: int = 0) -> Tensor:
    loss: Tensor = model.a * (SLOPE @ model.w)
    return loss


def read_out(model: Any, batch: float) -> Tensor:
    loss: Tensor = batch * (AIM @ model.w)
    return loss


def knob(name: str = "a", **options: Any) -> hdet.Scalar:
    given = {"bounds": (0.01, 100.0), "spread": TwoLevel(WIDTH), "controller": Hold(), **options}
    return hdet.Scalar(name, path=name, evidence=given.pop("evidence", Contrast()), **given)


def on_bound(name: str = "rate", **options: Any) -> hdet.Scalar:
    return knob(name, space=Arcsine(), bounds=(0.0, 0.9), spread=TwoLevel(0.15), **options)


def make(
    knobs: list[hdet.Knob],
    *,
    n: int = 4,
    copies: bool = False,
    window: int = 8,
    windows: int = 1,
    probe: Any = read_out,
    batches: Any = (1.0, 1.0),
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda m: torch.optim.SGD(m.parameters(), lr=RATE),
    **options: Any,
) -> Engine:
    model = Vector()
    return Engine(
        (hdet.replicate if copies else hdet.micro_batches)(model, optimizer(model), n=n),
        knobs,
        window=window,
        signal=Probe(probe, batches),
        total_steps=window * windows,
        **options,
    )


train = partial(explicit_loop.train, loss=scaled)


def secant(width: float = WIDTH) -> float:
    return math.sinh(width) / width


ONE_STEP = -RATE * float(AIM @ SLOPE) * SCALE  # d probe / d log a after one step


def noisy(model: Any, step: int, index: int) -> Tensor:
    noise = torch.randn(3, generator=torch.Generator().manual_seed(97 * step + index))
    loss: Tensor = (model.a * SLOPE + noise) @ model.w
    return loss


class Regulariser(ModuleKnob):
    """`Vector.late`, said to act in training alone."""

    kind = "regulariser_for_tests"
    role = "late"
    space: Space = Arcsine()
    bounds: tuple[float, float] = (0.0, 0.9)

    def cells(self, model: nn.Module, pattern: str) -> Any:
        from hdet.hparams.binding import Attribute

        return {"late": Attribute(model, "late")}


def regulariser(evidence: Contrast | None = None, **options: Any) -> Regulariser:
    given = {"spread": TwoLevel(0.15), "controller": Hold(), **options}
    return Regulariser(evidence=evidence or Contrast(), **given)
