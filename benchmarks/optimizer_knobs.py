"""Do momentum, betas and the threshold of clipping pay as knobs? Each from good and bad settings, beside holding it.

    python benchmarks/optimizer_knobs.py                  # all, 3 seeds: minutes
    python benchmarks/optimizer_knobs.py --only clipping --seeds 1

Two small tasks. `outliers`: a perceptron learns a teacher's values, of which some are far off (noise with a tail of
index 1.3), by their square error; held out is a Huber loss, and the test loss is the square error without noise.
`digits`: scikit-learn's digits, a fifth of the training labels wrong, cross-entropy. All runs have a straight line to 0
as the schedule of their rate. Where momentum and betas are asked about, gradients are clipped to a norm of 1.

    held          the setting as it is, nothing else moves
    knob          the knob alone moves, by Recursion evidence
    recipe        `hdet.recommended`, the setting held
    recipe+knob   the same with the knob

Printed are test losses, lower is better: the mean over seeds, and each seed's.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, huber_loss
from torch.optim import SGD, AdamW, Optimizer

import hdet
from hdet.controllers import Hold
from hdet.schedules import LinearDecay
from hdet.spreads import TwoLevel

STEPS, BATCH, SUB_BATCHES = 600, 64, 8
Loss = Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]


@dataclass(frozen=True)
class Task:
    """What is learnt.

    Attributes:
        make: a model.
        batch: a training batch by its step.
        loss: of training, a scalar.
        held_out: inputs and targets of the probe.
        probe: a loss for each of its sub-batches.
        test: of a trained model.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    loss: Loss
    held_out: tuple[Tensor, Tensor]
    probe: Loss
    test: Callable[[nn.Module], float]


def outliers(seed: int) -> Task:
    """A teacher's values with far outliers."""
    width = 20
    draws = torch.Generator().manual_seed(seed)
    one, two = torch.randn(width, 32, generator=draws) * 1.5 / width**0.5, torch.randn(32, generator=draws) * 0.3

    def truth(x: Tensor) -> Tensor:
        y: Tensor = (x @ one).tanh() @ two
        return y

    def noisy(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, width, generator=generator)
        tail = torch.rand(count, generator=generator).clamp_min(1e-4).pow(-1 / 1.3)
        return x, truth(x) + 0.2 * tail * torch.randn(count, generator=generator)

    clean = torch.randn(4000, width, generator=draws)

    def test(model: nn.Module) -> float:
        loss: float = (model(clean).squeeze(-1) - truth(clean)).square().mean().item()
        return loss

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    return Task(
        make,
        lambda step: noisy(BATCH, torch.Generator().manual_seed(1000 * seed + step + 1)),
        lambda model, batch: (model(batch[0]).squeeze(-1) - batch[1]).square().mean(),
        noisy(SUB_BATCHES * BATCH, draws),
        lambda model, batch: huber_loss(model(batch[0]).squeeze(-1), batch[1], reduction="none").mean(1),
        test,
    )


def digits(seed: int) -> Task:
    """Digits, a fifth of the training labels drawn at random."""
    data: Any = load_digits()
    draws = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(data.target), generator=draws)
    x, y = torch.tensor(data.data).float()[order] / 16.0, torch.tensor(data.target)[order]
    held, test_set, train = slice(0, 256), slice(256, 856), slice(856, None)
    inputs, labels = x[train], y[train].clone()
    wrong = torch.rand(len(labels), generator=draws) < 0.2
    labels[wrong] = torch.randint(0, 10, (int(wrong.sum()),), generator=draws)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(0, len(labels), (BATCH,), generator=torch.Generator().manual_seed(1000 * seed + step))
        return inputs[chosen], labels[chosen]

    return Task(
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        batch,
        lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        (x[held], y[held]),
        lambda model, batch: cross_entropy(model(batch[0]).movedim(-1, 1), batch[1], reduction="none").mean(1),
        lambda model: cross_entropy(model(x[test_set]), y[test_set]).item(),
    )


TASKS: dict[str, Callable[[int], Task]] = {"outliers": outliers, "digits": digits}


@dataclass(frozen=True)
class Setting:
    """An optimizer at a setting of one hyperparameter, and the knob that moves it."""

    name: str
    optimizer: Callable[[nn.Module], Optimizer]
    knob: Callable[[], hdet.Knob]
    norm: float | None = None


def sgd(momentum: float, rate: float = 0.05) -> Callable[[nn.Module], Optimizer]:
    return lambda model: SGD(model.parameters(), lr=rate, momentum=momentum)


def adamw(beta2: float = 0.999, rate: float = 3e-3) -> Callable[[nn.Module], Optimizer]:
    return lambda model: AdamW(model.parameters(), lr=rate, betas=(0.9, beta2))


def clipped(name: str, optimizer: Callable[[nn.Module], Optimizer], norm: float) -> Setting:
    return Setting(f"{name}, norm {norm:g}", optimizer, lambda: hdet.ClipNorm(evidence=hdet.evidence.Recursion()), norm)


@dataclass(frozen=True)
class Part:
    """A question: on which tasks, from which settings, by which contenders."""

    tasks: tuple[str, ...]
    settings: tuple[Setting, ...]
    contenders: tuple[str, ...] = field(default=("held", "knob"))


NORMS = (0.03, 0.3, 3.0, 10.0)
PARTS: dict[str, Part] = {
    "clipping": Part(
        ("outliers",),
        (
            Setting("SGD, no clipping", sgd(0.9, 0.1), hdet.Momentum),
            *(clipped("SGD", sgd(0.9, 0.1), norm) for norm in NORMS),
            Setting("AdamW, no clipping", adamw(rate=0.01), hdet.Beta2),
            *(clipped("AdamW", adamw(rate=0.01), norm) for norm in NORMS),
        ),
    ),
    "momentum": Part(
        ("outliers", "digits"),
        tuple(
            Setting(
                f"SGD, momentum {mu:g}", sgd(mu), lambda: hdet.Momentum(evidence=hdet.evidence.Recursion()), norm=1.0
            )
            for mu in (0.5, 0.9, 0.99)
        ),
        ("held", "recipe", "recipe+knob"),
    ),
    "beta2": Part(
        ("outliers", "digits"),
        tuple(
            Setting(
                f"AdamW, beta2 {beta:g}", adamw(beta), lambda: hdet.Beta2(evidence=hdet.evidence.Recursion()), norm=1.0
            )
            for beta in (0.9, 0.999)
        ),
        ("held", "recipe", "recipe+knob"),
    ),
}


def engine(task: Task, model: nn.Module, optimizer: Optimizer, setting: Setting, contender: str) -> hdet.Engine:
    """The engine of a contender."""
    probe = hdet.Probe(task.probe, [tuple(part.unflatten(0, (SUB_BATCHES, -1)) for part in task.held_out)])
    rate = float(optimizer.param_groups[0]["lr"])
    schedule = LinearDecay(rate, total_steps=STEPS, warmup=0.1)
    knobs = [setting.knob()] if contender in ("knob", "recipe+knob") else []
    if contender.startswith("recipe"):
        return hdet.recommended(
            model, optimizer, total_steps=STEPS, probe=probe, schedule=schedule, knobs=knobs, quiet=True
        )
    held = hdet.LearningRate(
        schedule=schedule, controller=Hold(), spread=TwoLevel(0.0), evidence=hdet.evidence.Divergent()
    )
    return hdet.Engine(
        hdet.micro_batches(model, optimizer, 1),
        [held, *knobs],
        window=hdet.windows.GrowingWindow(),
        signal=probe,
        total_steps=STEPS,
    )


def trained(task: Task, setting: Setting, contender: str, seed: int) -> float:
    """The test loss of one run."""
    torch.manual_seed(seed)
    model = task.make()
    optimizer = setting.optimizer(model)
    if setting.norm is not None:
        hdet.clip_gradients(optimizer, norm=setting.norm)
    at_work = engine(task, model, optimizer, setting, contender)
    for step in range(STEPS):
        for replica in at_work.replicas:
            with replica:
                loss = task.loss(model, task.batch(step))
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        at_work.step([loss.detach()])
    with torch.no_grad():
        return task.test(model)


def rows(part: Part, seeds: range) -> Iterator[tuple[str, str, list[list[float]]]]:
    """By task and setting, each contender's test losses."""
    for name in part.tasks:
        tasks = [TASKS[name](seed) for seed in seeds]
        for setting in part.settings:
            contenders = part.contenders if "no clipping" not in setting.name else part.contenders[:1]
            losses = [
                [trained(task, setting, contender, seed) for task, seed in zip(tasks, seeds, strict=True)]
                for contender in contenders
            ]
            yield name, setting.name, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(PARTS), nargs="+", default=list(PARTS))
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    warnings.filterwarnings("ignore", "the probe is too small")
    torch.set_num_threads(1)
    for question in given.only:
        part = PARTS[question]
        print(f"\n{question}: {', '.join(part.contenders)}; {given.seeds} seeds")
        for task, setting, losses in rows(part, range(given.seeds)):
            told = (f"{sum(one) / len(one):.3f} ({' '.join(f'{v:.3f}' for v in one)})" for one in losses)
            print(f"  {task:9s} {setting:22s} " + "   ".join(told), flush=True)


if __name__ == "__main__":
    main()
