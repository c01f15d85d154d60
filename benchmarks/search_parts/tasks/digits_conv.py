"""Handwritten digits by a convolutional network with batch normalisation, SGD."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor, nn

from hdet.app.tasks import Digits
from hdet.nn import CrossEntropyLoss, Dropout
from search_parts.digits import DigitsProblem
from search_parts.examples import built
from search_parts.task import ALL_OFF, DECAYS, DROPOUTS, LEARNING_RATES, Grid, Task, doubling

PROBE_EXAMPLES = 8  # times 8 sub-batches: as large as a training batch


class ConvNet(nn.Module):
    """Two convolutions with batch normalisation, mean pooling over quarters of the image, dropout."""

    def __init__(self, dropout: float, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
            nn.AvgPool2d(4),
            nn.Flatten(),
            Dropout(dropout),
        )
        self.head = nn.Linear(8 * channels, 10)
        self.criterion = CrossEntropyLoss()

    def forward(self, pixels: Tensor) -> Tensor:
        """[batch, 64] to logits [batch, 10]."""
        return self.head(self.body(pixels.view(-1, 1, 8, 8)))  # type: ignore[no-any-return]


class ConvProblem(DigitsProblem):
    """The digits, for another model."""

    def __init__(self, digits: Digits, *, seed: int, batch: int, channels: int) -> None:
        super().__init__(digits, seed=seed, batch=batch)
        self.channels = channels

    def model(self) -> nn.Module:
        return built(self.workload.seed, lambda: ConvNet(self.workload.task.dropout, self.channels))


@dataclass(frozen=True, kw_only=True)
class ConvTask(Task):
    """A convolutional network on digits, a tenth of whose labels are wrong.

    Attributes:
        channels: of the first layer; the second has twice as many.
    """

    channels: int = 16

    def narrowed(self, factor: int) -> ConvTask:
        return replace(self, channels=self.channels // factor)

    def problem(self, seed: int, dropout: float) -> ConvProblem:
        digits = Digits(label_noise=0.1, dropout=dropout, probe_batches=self.sub_batches, probe_examples=PROBE_EXAMPLES)
        return ConvProblem(digits, seed=seed, batch=self.batch, channels=self.channels)


TASK = ConvTask(
    name="digits_conv",
    title="Digits by a convolutional network (SGD with momentum)",
    steps=500,
    batch=64,
    family="sgd",
    ignorance=math.log(10),
    grid=Grid(doubling(0.0125, 7), (1e-3, 3e-3, 1e-2, 3e-2), (0.0, 0.2, 0.4)),
    starts=LEARNING_RATES + DECAYS + DROPOUTS + ALL_OFF,
    shorter=4,
    development=True,
)
