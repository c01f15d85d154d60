"""From a force to the motion it causes: an operator between functions, learnt by two networks with AdamW."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from hdet.nn import Dropout
from search_parts.examples import DrawnProblem, DrawnTask
from search_parts.task import ALL_OFF, DECAYS, DROPOUTS, LEARNING_RATES, Grid, doubling

SIZES = {"train": 600, "probe": 400, "test": 1500}
SENSORS, PLACES, MODES, NOISE = 32, 8, 5, 0.1
WIDTH, RANK = 96, 24
Examples = tuple[Tensor, Tensor, Tensor]


@lru_cache(maxsize=1)
def examples() -> dict[str, Examples]:
    """(force [n, 32], times [n, 8, 1], motion [n, 8]) of each split.

    A pendulum at rest, x'' = -sin(3 x) - 0.3 x' + 2 f(t), is pushed by a random sum of five sines. Its place at eight
    times of each push, in units of the standard deviation over all, with noise of 0.1 on what is trained on.
    """
    rng = np.random.default_rng(20260113)
    count, steps = sum(SIZES.values()), 320
    phases, sizes = rng.random((count, MODES, 1)) * 2 * math.pi, rng.standard_normal((count, MODES, 1))
    modes = np.arange(1, MODES + 1)[None, :, None]
    times = np.linspace(0.0, 1.0, steps)
    force = (sizes / modes * np.sin(math.pi * modes * times + phases)).sum(axis=1)
    place, speed, step = np.zeros(count), np.zeros(count), 5.0 / steps
    places = np.empty((count, steps))
    for t in range(steps):
        speed = speed + step * (-np.sin(3 * place) - 0.3 * speed + 2 * force[:, t])
        place = place + step * speed
        places[:, t] = place
    places = (places - places.mean()) / places.std()
    asked = rng.integers(steps, size=(count, PLACES))
    motion = np.take_along_axis(places, asked, axis=1)
    motion[: SIZES["train"]] += NOISE * rng.standard_normal((SIZES["train"], PLACES))
    columns = (force[:, :: steps // SENSORS], times[asked][..., None], motion)
    tensors = [torch.from_numpy(np.ascontiguousarray(column)).float() for column in columns]
    parts = zip(*(torch.split(column, list(SIZES.values())) for column in tensors), strict=True)
    return dict(zip(SIZES, parts, strict=True))


def network(inputs: int, dropout: float, width: int) -> nn.Sequential:
    """Two hidden layers, to as many numbers as the two networks share."""
    layers: list[nn.Module] = []
    for entering in (inputs, width):
        layers += [nn.Linear(entering, width), nn.SiLU(), Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(width, RANK))


class Operator(nn.Module):
    """The inner product of a network of the force and a network of the time (DeepONet)."""

    def __init__(self, dropout: float, width: int = WIDTH) -> None:
        super().__init__()
        self.branch, self.trunk = network(SENSORS, dropout, width), network(1, dropout, width)

    def forward(self, force: Tensor, times: Tensor) -> Tensor:
        """[batch, sensors] and [batch, places, 1] to [batch, places]."""
        return (self.trunk(times) @ self.branch(force)[:, :, None])[..., 0]  # type: ignore[no-any-return]


class OperatorProblem(DrawnProblem):
    """The generated pushes."""

    splits = examples
    network = Operator

    def example_losses(self, model: nn.Module, batch: Examples) -> Tensor:
        force, times, motion = batch
        return (model(force, times) - motion).square().mean(dim=1)  # type: ignore[no-any-return]


TASK = DrawnTask(
    name="operator",
    title="A pendulum's motion from its pushes, two networks (AdamW)",
    steps=900,
    batch=64,
    family="adamw",
    ignorance=1.0,
    grid=Grid(doubling(0.0005, 8), (0.03, 0.3), (0.0, 0.1)),
    starts=LEARNING_RATES + DECAYS + DROPOUTS + ALL_OFF,
    micro_batches=4,
    shorter=4,
    problems=OperatorProblem,
)
