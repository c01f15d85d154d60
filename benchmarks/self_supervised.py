"""`hdet.attach` in self-supervised training: what a linear layer reads off the features, beside the same rate held.

    python benchmarks/self_supervised.py               # three methods, three rates, two seeds, some 12 minutes
    python benchmarks/self_supervised.py --methods byol --seeds 1

SimCLR (Chen et al. 2020, arXiv 2002.05709), BYOL (Grill et al. 2020, arXiv 2006.07733) and MoCo (He et al. 2019,
arXiv 1911.05722), small, on the textures of the search benchmark without their labels. The probe is the method's own
loss on held-out pictures. Prints the test accuracy of a logistic regression on the encoder's features after training:
with the rate held, with hdet, and with hdet and no guard.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Sequence

import numpy as np
import torch
from search_parts.tasks.textures import SIDE, Inverted, examples
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional as F

import hdet

STEPS, BATCH, WARMUP, PROBES, LABELLED = 400, 64, 40, 8, 1000
RATES = (0.01, 0.1, 1.0)
CHANNELS, HIDDEN, CODE, QUEUE, FOLLOW, TEMPERATURE = 24, 64, 32, 512, 0.02, 0.2


def changed(pictures: Tensor) -> Tensor:
    """Another view of each: moved around the edges, its contrast and its noise drawn anew."""
    moved = torch.roll(pictures, (int(torch.randint(SIDE, ())), int(torch.randint(SIDE, ()))), (2, 3))
    return moved * (1 + 0.3 * torch.randn(len(moved), 1, 1, 1)) + 0.4 * torch.randn_like(moved)


def layers(entering: int, leaving: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(entering, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, leaving))


def encoder() -> nn.Sequential:
    stem = [nn.Conv2d(1, CHANNELS, 3, stride=2, padding=1), nn.BatchNorm2d(CHANNELS), nn.SiLU()]
    return nn.Sequential(*stem, Inverted(CHANNELS), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class SimCLR(nn.Module):
    """Two views of a picture are to be nearer than those of others in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()
        self.student = nn.Sequential(self.encoder, layers(CHANNELS, CODE))

    def forward(self, pictures: Tensor) -> Tensor:
        codes = F.normalize(torch.cat([self.student(changed(pictures)) for _ in range(2)]), dim=1)
        alike = (codes @ codes.T / TEMPERATURE).fill_diagonal_(-1e9)
        count = len(pictures)
        return F.cross_entropy(alike, torch.arange(2 * count).roll(count))

    def follow(self) -> None:
        """Nothing follows."""


class BYOL(SimCLR):
    """What a teacher makes of another view is to be told from this one; the teacher follows."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.predict = layers(CODE, CODE)

    def forward(self, pictures: Tensor) -> Tensor:
        views = [changed(pictures) for _ in range(2)]
        with torch.no_grad():
            told = [self.teacher(view) for view in reversed(views)]
        guessed = [self.predict(self.student(view)) for view in views]
        return 2 - F.cosine_similarity(torch.cat(guessed), torch.cat(told)).mean() * 2

    @torch.no_grad()
    def follow(self) -> None:
        for own, taken in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            own.lerp_(taken, FOLLOW)


class MoCo(BYOL):
    """A teacher's code of another view is to be nearer than those in a queue."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        del self.predict
        self.register_buffer("queue", F.normalize(torch.randn(QUEUE, CODE), dim=1))

    def forward(self, pictures: Tensor) -> Tensor:
        own = F.normalize(self.student(changed(pictures)), dim=1)
        with torch.no_grad():
            self.keys = F.normalize(self.teacher(changed(pictures)), dim=1)
        alike = torch.cat([(own * self.keys).sum(1, keepdim=True), own @ self.queue.clone().T], dim=1)
        return F.cross_entropy(alike / TEMPERATURE, torch.zeros(len(own), dtype=torch.long))

    @torch.no_grad()
    def follow(self) -> None:
        super().follow()
        self.queue.copy_(torch.cat([self.keys, self.queue])[:QUEUE])


METHODS = {kind.__name__.lower(): kind for kind in (SimCLR, BYOL, MoCo)}


def accuracy(method: type[SimCLR], rate: float, seed: int, *, searched: bool, guarded: bool = True) -> float:
    """Of a logistic regression, after training."""
    torch.manual_seed(seed)
    splits = examples()
    pictures, kinds = splits["train"]
    model = method()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=rate, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP) * (0.5 + 0.5 * math.cos(math.pi * step / STEPS))
    )
    if searched:
        probe = hdet.Probe(lambda model, batch: model(batch), splits["probe"][0][: PROBES * BATCH].split(BATCH))
        guard = hdet.Rewind() if guarded else None
        hdet.attach(model, optimizer, probe=probe, scheduler=schedule, total_steps=STEPS, quiet=True, guard=guard)
    drawn = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        model(pictures[torch.randint(len(pictures), (BATCH,), generator=drawn)]).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        model.follow()
    model.eval()
    with torch.no_grad():
        known, asked = model.encoder(pictures[:LABELLED]).numpy(), model.encoder(splits["test"][0]).numpy()
    centre, scale = known.mean(0), known.std(0) + 1e-6
    reader = LogisticRegression(max_iter=1000).fit((known - centre) / scale, kinds[:LABELLED].numpy())
    return float(reader.score((asked - centre) / scale, splits["test"][1].numpy()))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    ways = {
        "held": {"searched": False},
        "hdet": {"searched": True},
        "hdet, no guard": {"searched": True, "guarded": False},
    }
    for name in given.methods:
        for rate in RATES:
            for told, way in ways.items():
                found = [accuracy(METHODS[name], rate, seed, **way) for seed in range(given.seeds)]
                each = " ".join(f"{one:.3f}" for one in found)
                print(f"{name:7} rate {rate:<5g} {told:15} {np.mean(found):.3f} ({each})", flush=True)


if __name__ == "__main__":
    main()
