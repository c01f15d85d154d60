"""A learning rate for each parameter group: their ratios set by how far steps go, and what they share searched.

    python examples/rates_by_group.py --steps 300

The head of a network often wants another rate than its body. Patterns on parameter names say which parameters have a
rate together; an optimizer that has such groups already is given `rates="groups"`. Each group sets out from the rate it
holds, and goes to where its steps, beside its weights, go as far as those of the others.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import hdet

CENTRES = torch.randn(10, 20, generator=torch.Generator().manual_seed(0))


def examples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(10, (count,))
    return CENTRES[labels] + 2 * torch.randn(count, 20), labels


def train(steps: int) -> hdet.Search:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    held_out = [examples(64) for _ in range(8)]
    probe = hdet.Probe(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), held_out)
    search = hdet.attach(
        model,
        optimizer,
        probe=probe,
        total_steps=steps,
        rates={"head": "2.*", "biases": "*bias"},  # what neither matches is called "others"
        exclude=["weight_decay"],
    )

    for _ in range(steps):
        inputs, labels = examples(32)
        search.loss(F.cross_entropy(model(inputs), labels)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return search


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    for name, learned in train(parser.parse_args().steps).shifts.items():
        print(f"{name}: {learned}")
