"""A hyperparameter of your own: any number of the model that the forward pass reads.

    python examples/own_knob.py --steps 200

Here it is the strength of noise on the inputs. It is declared by its path, its bounds and the space in which it moves.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hdet

CENTRES = torch.randn(10, 20, generator=torch.Generator().manual_seed(0))


class Noise(nn.Module):
    """Noise on the inputs while training, against overfitting."""

    def __init__(self, strength: float) -> None:
        super().__init__()
        self.strength = strength

    def forward(self, x: Tensor) -> Tensor:
        return x + self.strength * torch.randn_like(x) if self.training else x


def examples(count: int) -> tuple[Tensor, Tensor]:
    labels = torch.randint(10, (count,))
    return CENTRES[labels] + 2 * torch.randn(count, 20), labels


def train(steps: int) -> hdet.Search:
    torch.manual_seed(0)
    model = nn.Sequential(Noise(1.0), nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    held_out = [examples(64) for _ in range(8)]
    probe = hdet.Probe(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), held_out)
    noise = hdet.Scalar("noise", path="0.strength", space=hdet.spaces.Log(), bounds=(0.01, 10.0))
    search = hdet.attach(model, optimizer, probe=probe, total_steps=steps, knobs=[noise], micro_batches=2)

    for _ in range(steps):
        for _ in range(2):
            inputs, labels = examples(16)
            (search.loss(F.cross_entropy(model(inputs), labels)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return search


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    for name, learned in train(parser.parse_args().steps).shifts.items():
        print(f"{name}: {learned}")
