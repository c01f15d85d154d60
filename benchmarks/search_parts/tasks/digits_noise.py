"""Handwritten digits, a fifth of the labels wrong, SGD: learning rate, decay and dropout all matter."""

from __future__ import annotations

import math

from hdet.app.tasks import Digits
from search_parts.digits import DigitsProblem
from search_parts.task import DECAYS, DROPOUTS, LEARNING_RATES, NINE, Grid, Task, doubling

PROBE_EXAMPLES = 16  # times 8 sub-batches: as large as a training batch


class DigitsTask(Task):
    """A perceptron on noisy digits."""

    def problem(self, seed: int, dropout: float) -> DigitsProblem:
        digits = Digits(label_noise=0.2, dropout=dropout, probe_batches=self.sub_batches, probe_examples=PROBE_EXAMPLES)
        return DigitsProblem(digits, seed=seed, batch=self.batch)


TASK = DigitsTask(
    name="digits_noise",
    title="Digits with label noise (SGD with momentum)",
    steps=1000,
    batch=128,
    family="sgd",
    ignorance=math.log(10),
    grid=Grid(doubling(0.0125, 6), (1e-3, 3e-3, 1e-2, 3e-2), (0.0, 0.15, 0.3, 0.5)),
    starts=LEARNING_RATES + DECAYS + DROPOUTS + NINE,
    micro_batches=8,
    shorter=2,
    development=True,
)
