"""A ResNet on CIFAR-10, as papers train it: against OneCycleLR and cosine, with hdet or without.

    python examples/cifar_resnet.py cifar-10-batches-py --schedule one_cycle
    python examples/cifar_resnet.py cifar-10-batches-py --schedule one_cycle --hdet
    python examples/cifar_resnet.py cifar-10-batches-py --schedule cosine --lr 0.01 --hdet --window 50 --micro-batches 4

The folder is the data set's own "python version" (https://www.cs.toronto.edu/~kriz/cifar.html): `data_batch_1` and so
on, and `test_batch`. Nothing is downloaded. The last 2,000 training images are held out for the probe, with hdet and
without it; the test set is looked at once, at the end.
"""

import argparse
import io
import json
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hdet

MEAN, DEVIATION = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
HELD_OUT = 2000


class ArraysOnly(pickle.Unpickler):
    """Reads pickled dictionaries of arrays, and calls nothing else that a file may name."""

    def find_class(self, module: str, name: str) -> Any:
        of_array = module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype")
        if of_array or (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a CIFAR-10 batch")


def read(folder: Path, names: list[str]) -> tuple[Tensor, Tensor]:
    """Images [count, 3, 32, 32] of bytes, and labels [count]."""
    images, labels = [], []
    for name in names:
        batch = ArraysOnly(io.BytesIO((folder / name).read_bytes()), encoding="bytes").load()
        images.append(torch.as_tensor(batch[b"data"]).view(-1, 3, 32, 32))
        labels.append(torch.as_tensor(batch[b"labels"]))
    return torch.cat(images), torch.cat(labels)


class Block(nn.Module):
    """Two convolutions with a shortcut around them."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """The 6n + 2 layers that He et al. (2016), section 4.2, train on CIFAR-10; n = 3 is ResNet-20."""

    def __init__(self, n: int = 3, width: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        stages, channels = [], width
        for stage in range(3):
            for block in range(n):
                stages.append(Block(channels, width << stage, 2 if stage and block == 0 else 1))
                channels = width << stage
        self.stages = nn.Sequential(*stages)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.dropout(self.stages(self.stem(images)).mean(dim=(2, 3))))


def normalised(images: Tensor) -> Tensor:
    return (images.float() / 255 - MEAN.view(3, 1, 1)) / DEVIATION.view(3, 1, 1)


def augmented(images: Tensor, numbers: torch.Generator) -> Tensor:
    """Shifted by up to 4 pixels and mirrored, each batch as one."""
    down, right = torch.randint(9, (2,), generator=numbers).tolist()
    shifted = F.pad(normalised(images), (4, 4, 4, 4))[:, :, down : down + 32, right : right + 32]
    return shifted.flip(3) if torch.rand((), generator=numbers) < 0.5 else shifted


def scheduler_of(name: str, optimizer: torch.optim.Optimizer, lr: float, steps: int) -> Any:
    if name == "one_cycle":
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps + 1, cycle_momentum=False)
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def train(options: argparse.Namespace) -> dict[str, float]:
    """Train; returns loss and share of errors on the test set."""
    torch.manual_seed(options.seed)
    names = sorted(path.name for path in options.folder.glob("data_batch_*"))
    images, labels = read(options.folder, names)
    held_out = min(HELD_OUT, len(images) // 5)
    cut = len(images) - held_out
    model = ResNet(options.blocks, options.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    steps = options.steps or options.epochs * (cut // options.batch)
    scheduler = scheduler_of(options.schedule, optimizer, options.lr, steps)
    parts = options.micro_batches
    search = None
    if options.hdet:
        size = min(options.batch // parts, held_out // 8)  # as many as in a pass that trains: BatchNorm

        def sub_batches(window: int) -> list[tuple[Tensor, Tensor]]:
            chosen = torch.randperm(held_out, generator=torch.Generator().manual_seed(window))[: 8 * size]
            return [(images[cut + part], labels[cut + part]) for part in chosen.split(size)]

        search = hdet.attach(
            model,
            optimizer,
            probe=hdet.Probe(lambda model, batch: F.cross_entropy(model(normalised(batch[0])), batch[1]), sub_batches),
            total_steps=steps,
            scheduler=scheduler,
            micro_batches=parts,
            window=options.window,
        )

    numbers = torch.Generator().manual_seed(options.seed)
    order = torch.randperm(cut, generator=numbers)
    for step in range(steps):
        place = step * options.batch % (cut - options.batch + 1)
        if place < options.batch:
            order = torch.randperm(cut, generator=numbers)
        for chosen in order[place : place + options.batch].chunk(parts):
            loss = F.cross_entropy(model(augmented(images[chosen], numbers)), labels[chosen])
            if search is not None:
                search.loss(loss)
            (loss / parts).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step}: training loss {loss.item():.3f}", flush=True)

    if search is not None:
        print(search.shifts)
    images, labels = read(options.folder, ["test_batch"])
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(normalised(part)) for part in images.split(500)])
    return {
        "test_loss": float(F.cross_entropy(logits, labels)),
        "test_error": float((logits.argmax(dim=1) != labels).float().mean()),
    }


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--schedule", choices=["one_cycle", "cosine"], default="one_cycle")
    parser.add_argument("--hdet", action="store_true", help="find the hyperparameters while training")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--steps", type=int, help="instead of epochs")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--micro-batches", type=int, default=2, help="N: passes of a step, at levels of their own")
    parser.add_argument("--window", type=int, help="T: steps between two readings; by default they grow")
    parser.add_argument("--blocks", type=int, default=3, help="n of 6n + 2 layers")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a folder for result.json, as studies/cifar.yaml wants it")
    return parser


if __name__ == "__main__":
    options = arguments().parse_args()
    found = train(options)
    print(f"test loss {found['test_loss']:.4f}, error {found['test_error']:.4f}")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "result.json").write_text(json.dumps(found))
