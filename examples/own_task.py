"""A task of your own for `hdet run`: own_task.yaml names `build`, which returns a model, its data and its losses.

    cd examples; hdet run own_task.yaml --compare

Batches are functions of (seed, step, replica) alone, so that a killed run goes on with the data it would have seen.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]


class Table:
    """Rows of 16 numbers, and the value that a formula gives each, with noise."""

    def __init__(self, *, seed: int, batch_size: int, device: str, rows: int, noise: float) -> None:
        self.seed, self.batch_size, self.device = seed, batch_size, device
        numbers = torch.Generator().manual_seed(0)  # the same data for every seed of a run
        inputs = torch.randn(rows + 2000, 16, generator=numbers)
        values = torch.sin(2 * inputs[:, 0]) + inputs[:, 1] * inputs[:, 2]
        values += noise * torch.randn(len(values), generator=numbers)
        whole = [tensor.to(device) for tensor in (inputs, values)]
        (x, held_out_x, test_x), (y, held_out_y, test_y) = (tensor.split([rows, 1000, 1000]) for tensor in whole)
        self.train, self.held_out, self.test = (x, y), (held_out_x, held_out_y), (test_x, test_y)
        self.facts = {"train": f"{rows} rows", "held out": "1000 rows", "test": "1000 rows"}

    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1), nn.Flatten(0))
        return layers.to(self.device)

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        return [{"name": "all", "params": list(model.parameters())}]

    def batch(self, step: int, replica: int) -> Batch:
        return drawn(self.train, self.batch_size, (self.seed, step, replica))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, values = batch
        return F.mse_loss(model(inputs), values)

    def probe(self, window: int) -> Sequence[Batch]:
        """Eight batches that are never trained on, other ones in each window."""
        return [drawn(self.held_out, self.batch_size, (self.seed, window, 1000 + part)) for part in range(8)]

    @torch.no_grad()
    def test_loss(self, model: nn.Module) -> float:
        training = model.training
        loss = float(self.loss(model.eval(), self.test))
        model.train(training)
        return loss


def drawn(split: Batch, count: int, place: tuple[int, int, int]) -> Batch:
    """Rows chosen by nothing but the place in the run."""
    inputs, values = split
    rows = torch.from_numpy(np.random.default_rng(place).integers(len(values), size=count)).to(values.device)
    return inputs[rows], values[rows]


def build(*, seed: int, batch_size: int, device: str, rows: int = 2000, noise: float = 0.3) -> Table:
    """Called with the run's seed, batch size and device, and with `options` of the file."""
    return Table(seed=seed, batch_size=batch_size, device=device, rows=rows, noise=noise)
