"""What the tests of the schedulers share: a user's script with replicas in one process, and its schedulers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
)

import hdet

# These loops often step a scheduler and not its optimizer; the tests of the warnings switch them on.
QUIET = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in ("Detected call of", "To get the last learning rate", "The epoch parameter")
]


def optimizer(kind: str = "sgd", groups: int = 2, lr: float | Tensor = 0.05) -> Optimizer:
    parameters = [
        {"params": [nn.Parameter(torch.ones(3))], **({} if index else {"lr": 0.5})} for index in range(groups)
    ]
    if kind == "adamw":
        return AdamW(parameters, lr=lr)
    return SGD(parameters, lr=lr, momentum=0.5)


@contextmanager
def rates_in_force(optimizers: Sequence[Optimizer]) -> Iterator[list[list[float]]]:
    """A row for each step of an optimizer: the rates of its groups inside that step."""
    seen: list[list[float]] = []
    hooks = [
        made.register_step_pre_hook(lambda made, *_: seen.append([float(group["lr"]) for group in made.param_groups]))
        for made in optimizers
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def first_rates(optimizers: Sequence[Optimizer]) -> list[float]:
    """The rate of the first group in a step of each optimizer, which no gradient makes a step of."""
    with rates_in_force(optimizers) as seen:
        for made in optimizers:
            made.step()
    return [row[0] for row in seen]


def course(scheduler: LRScheduler, steps: int) -> list[list[Any]]:
    """Everything a scheduler writes into its optimizer, step by step."""
    seen = []
    for _ in range(steps + 1):
        seen.append(
            [
                {key: value for key, value in group.items() if key != "params"}
                for group in scheduler.optimizer.param_groups
            ]
            + [list(scheduler.get_last_lr())]
        )
        scheduler.optimizer.step()
        if len(seen) <= steps:
            scheduler.step()
    return seen


TOTAL, WINDOW = 23, 4


class Job:
    """A user's script with N replicas in one process: a perceptron with BatchNorm on random data."""

    def __init__(self, wrap: Callable[[Optimizer, hdet.replicas.Replicas], Any], n: int = 3, kind: str = "sgd") -> None:
        generator = torch.Generator().manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        first, rest = list(self.model[0].parameters()), list(self.model[1:].parameters())
        groups = [{"params": first}, {"params": rest}]
        made: Optimizer
        made = SGD(groups, lr=0.1, momentum=0.9) if kind == "sgd" else AdamW(groups, lr=0.1)
        self.home = hdet.replicate(self.model, made, n=n)
        self.scheduler = wrap(made, self.home)
        self.step_count = 0

    def train(self, until: int, told: bool = True) -> list[list[list[float]]]:
        """Runs to a step; the rates in force at each step, [step][replica][group]."""
        optimizers = [made for _, made in self.home.hosts]
        with rates_in_force(optimizers) as seen:
            self._train(until, told)
        return [seen[row : row + len(optimizers)] for row in range(0, len(seen), len(optimizers))]

    def _train(self, until: int, told: bool) -> None:
        while self.step_count < until:
            losses = []
            for replica in self.home.local:
                generator = torch.Generator().manual_seed(1000 * self.step_count + replica.index)
                x = torch.randn(8, 4, generator=generator)
                loss = (replica.model(x) - x.sum(1, keepdim=True)).square().mean()
                loss.backward()
                losses.append(loss.detach())
            self.home.share_gradients()
            for _, made in self.home.hosts:
                made.step()
                made.zero_grad()
            self.scheduler.step(losses if told else None)
            self.step_count += 1

    def weights(self) -> list[Tensor]:
        return [t.clone() for model, _ in self.home.hosts for t in model.state_dict().values()]


def one_cycle(made: Optimizer, home: hdet.replicas.Replicas, **options: Any) -> hdet.OneCycleHDET:
    settings = {"spread": 0.2, "window": WINDOW, "auto_lr_warmup": 8, "sigma": 0.05, "replicas": home, **options}
    return hdet.OneCycleHDET(made, [0.1, 0.05], total_steps=TOTAL, **settings)


def cycle_end(max_lr: list[float]) -> list[float]:
    plain = OneCycleLR(optimizer(), max_lr, total_steps=TOTAL)
    for _ in range(TOTAL):
        plain.step()
    return [group["lr"] for group in plain.optimizer.param_groups]


WRAPS: dict[str, Callable[[Optimizer, hdet.replicas.Replicas], Any]] = {
    "one_cycle": one_cycle,
    "cosine": lambda made, home: hdet.explore(CosineAnnealingLR(made, TOTAL), window=WINDOW, replicas=home),
    "warm-up from zero": lambda made, home: hdet.explore(
        LambdaLR(made, lambda t: min(t / 6, 1.0)), window=WINDOW, replicas=home
    ),
    "sequential": lambda made, home: hdet.explore(
        SequentialLR(made, [LinearLR(made, 0.1, total_iters=5), ExponentialLR(made, 0.9)], milestones=[5]),
        window=WINDOW, replicas=home, total_steps=TOTAL,
    ),
}  # fmt: skip
