"""Digits restored from noise by an autoencoder with AdamW: fresh noise in every step, few digits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from hdet.app.tasks import Digits
from hdet.app.tasks.draws import draws
from hdet.nn import Dropout
from hdet.replicas.tensors import evaluating
from search_parts.digits import DigitsProblem
from search_parts.examples import built
from search_parts.task import ALL_OFF, DECAYS, DROPOUTS, LEARNING_RATES, Grid, Task, doubling

NOISE, WIDTH, CODE = 0.5, 128, 24
PROBE_EXAMPLES = 8
Pictures = tuple[Tensor, Tensor]


class Autoencoder(nn.Module):
    """64 - 128 - 24 - 128 - 64, GELU, dropout in the wide layers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((64, WIDTH), (WIDTH, CODE), (CODE, WIDTH)):
            layers += [nn.Linear(inputs, outputs), nn.GELU()]
            if outputs == WIDTH:
                layers.append(Dropout(dropout))
        self.layers = nn.Sequential(*layers, nn.Linear(WIDTH, 64))

    def forward(self, pixels: Tensor) -> Tensor:
        """[batch, 64] noisy pixels to clean ones."""
        return self.layers(pixels)  # type: ignore[no-any-return]


class DenoisingProblem(DigitsProblem):
    """Pairs of noisy and clean pixels, both in units of the pixels' standard deviation (0.38)."""

    def model(self) -> nn.Module:
        return built(self.workload.seed, lambda: Autoencoder(self.workload.task.dropout))

    def batch(self, step: int) -> Pictures:
        return self._noisy(super().batch(step)[0], "noise", step)

    def loss(self, model: nn.Module, batch: Pictures) -> Tensor:
        return self.example_losses(model, batch).mean()

    def probe(self, window: int) -> Pictures:
        return self._noisy(super().probe(window)[0], "probe noise", window)

    def example_losses(self, model: nn.Module, batch: Pictures) -> Tensor:
        noisy, clean = batch
        return (model(noisy) - clean).square().mean(dim=1)  # type: ignore[no-any-return]

    def test_loss(self, model: nn.Module) -> float:
        clean = self.workload.splits["test"][0].repeat(8, 1)
        with evaluating(model), torch.no_grad():
            return float(self.loss(model, self._noisy(clean, "test noise", 0, seed=0)))

    def _noisy(self, pixels: Tensor, stream: str, step: int, seed: int | None = None) -> Pictures:
        clean = (pixels - 0.305) / 0.376
        key = self.workload.seed if seed is None else seed
        word = int(draws(1, below=2**62, seed=key, stream=stream, step=step)[0])
        noise = np.random.default_rng(word).standard_normal(clean.shape, dtype=np.float32)
        return clean + NOISE * torch.from_numpy(noise), clean


class DenoisingTask(Task):
    """A denoising autoencoder."""

    def problem(self, seed: int, dropout: float) -> DenoisingProblem:
        digits = Digits(dropout=dropout, probe_batches=self.sub_batches, probe_examples=PROBE_EXAMPLES)
        return DenoisingProblem(digits, seed=seed, batch=self.batch)


TASK = DenoisingTask(
    name="denoise",
    title="Digits restored from noise (AdamW)",
    steps=800,
    batch=64,
    family="adamw",
    ignorance=1.0,
    grid=Grid(doubling(0.002, 7), (0.03, 0.3, 1.0), (0.0, 0.1)),
    starts=LEARNING_RATES + DECAYS + DROPOUTS + ALL_OFF,
    micro_batches=4,
    shorter=4,
    development=True,
)
