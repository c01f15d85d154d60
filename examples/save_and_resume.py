"""Stop a run and go on with it later: the search is saved beside model and optimizer, and the run is the same.

    python examples/save_and_resume.py --steps 200

Trains half of the run, saves, builds everything anew, restores and trains the rest.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import hdet

CENTRES = torch.randn(10, 20, generator=torch.Generator().manual_seed(0))


def examples(step: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a step, the same whenever it is asked for: a resumed run sees what it would have seen."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(10, (count,), generator=generator)
    return CENTRES[labels] + 2 * torch.randn(count, 20, generator=generator), labels


def build(steps: int, history: hdet.History) -> tuple[nn.Module, torch.optim.Optimizer, hdet.Search]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    held_out = [examples(-1 - number, 64) for number in range(8)]
    probe = hdet.Probe(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), held_out)
    search = hdet.attach(model, optimizer, probe=probe, total_steps=steps, history=history, quiet=True)
    return model, optimizer, search


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, search: hdet.Search, first: int, last: int
) -> hdet.Search:
    for step in range(first, last):
        inputs, labels = examples(step, 32)
        search.loss(F.cross_entropy(model(inputs), labels)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return search


def run(steps: int, folder: Path) -> hdet.Search:
    """Train to the end in two sittings."""
    model, optimizer, search = build(steps, hdet.History(folder / "history.jsonl"))
    train(model, optimizer, search, 0, steps // 2)
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "search": search.state_dict()},
        folder / "checkpoint.pt",
    )
    search.detach()

    model, optimizer, search = build(steps, hdet.History(folder / "history.jsonl"))
    kept = torch.load(folder / "checkpoint.pt", weights_only=True)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    search.load_state_dict(kept["search"])  # the three in any order
    return train(model, optimizer, search, steps // 2, steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs/save_and_resume"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, learned in run(options.steps, options.out).shifts.items():
        print(f"{name}: {learned}")
