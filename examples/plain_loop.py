"""An ordinary training loop, and the one line that lets it find its own hyperparameters.

    python examples/plain_loop.py --steps 300

A small classifier starts with a learning rate that is far too low. What the search found is printed at the end.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import hdet

CENTRES = torch.randn(10, 20, generator=torch.Generator().manual_seed(0))


def examples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points around ten centres, and which centre each belongs to. Your data go here."""
    labels = torch.randint(10, (count,))
    return CENTRES[labels] + 2 * torch.randn(count, 20), labels


def train(steps: int) -> hdet.Search:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)

    held_out = [examples(64) for _ in range(8)]  # what the model never trains on
    probe = hdet.Probe(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), held_out)
    search = hdet.attach(model, optimizer, probe=probe, total_steps=steps)  # the one new line

    for _ in range(steps):
        inputs, labels = examples(32)
        loss = F.cross_entropy(model(inputs), labels)
        search.loss(loss).backward()  # `loss.backward()` does too; this also tells hdet the training loss
        optimizer.step()
        optimizer.zero_grad()
    return search


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    for name, learned in train(parser.parse_args().steps).shifts.items():
        print(f"{name}: {learned}")
