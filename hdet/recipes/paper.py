"""The paper as one declaration: Cheng, Huang, Zhu and Alonso 2026, arXiv:2604.24708, its errata corrected.

`docs/paper.md` goes through the paper section by section.

| paper | here |
|---|---|
| Eq. 1, lr_r = base (1 + a (r - (N-1)/2) / d) | `Symmetric` levels in `Relative` space |
| reassign each window | design `Permutation` |
| theta <- mean_r theta_r every T steps | `Mean` merge, `FixedWindow` |
| softmax displacement of the window-mean training loss | estimator `Softmax`, signal `TrainingLoss` |
| momentum, decay to the floor | controller `Paper` |
| the base no longer follows the cycle once it is controlled | schedule `HeldOneCycle` |
| warm noisy start | `hdet.perturb` |
"""

from __future__ import annotations

from typing import Any, Literal

from hdet.controllers import Controller, Hold, Paper
from hdet.controllers.estimators import Softmax
from hdet.engine.admission import counted, whole
from hdet.engine.engine import Engine
from hdet.errors import ConfigError
from hdet.evidence import Divergent
from hdet.hparams import LearningRate, OneCycle, Permutation, Relative, Symmetric
from hdet.hparams.schedule import HeldOneCycle
from hdet.merging import Mean
from hdet.replicas import Replicas
from hdet.signals import TrainingLoss
from hdet.windows import FixedWindow

SPREAD = 1 / 9
WINDOW = 1000
SIGMA = 0.1
BETA = 0.9
RATE = 0.5


def evidence(sigma: float = SIGMA) -> Divergent:
    """Independent permutations, and the displacement of the softmax-weighted mean."""
    return Divergent(estimator=Softmax(sigma), design=Permutation())


def merge() -> Mean:
    """The mean of parameters. Each replica keeps its optimizer's state, of which the paper does not speak."""
    return Mean(optimizer="keep")


def knob(
    group: int,
    *,
    floor: float,
    highest: float,
    warmup: int,
    spread: float = SPREAD,
    auto_lr: bool = True,
    beta: float = BETA,
    rate: float = RATE,
    **fields: Any,
) -> LearningRate:
    """The learning rate of one parameter group as the paper explores it.

    Args:
        floor: the rate that control decays to by the end of the run.
        highest: the schedule's largest rate.
        warmup: steps before control begins.
        spread, auto_lr, beta, rate: as of `paper_engine`; `fields` are further ones of the knob.
    """
    controller: Controller = Paper(floor, warmup_steps=warmup, beta=beta, rate=rate) if auto_lr else Hold()
    return LearningRate(
        groups=group,
        space=Relative(),
        spread=Symmetric(spread),
        controller=controller,
        bounds=(0.0, max(100.0, 10 * highest)),
        **fields,
    )


def paper_engine(
    replicas: Replicas,
    *,
    max_lr: float,
    total_steps: int,
    window: int = WINDOW,
    spread: float = SPREAD,
    warmup_steps: int | None = None,
    auto_lr: bool = True,
    sigma: float = SIGMA,
    beta: float = BETA,
    rate: float = RATE,
    pct_start: float = 0.3,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    gradients: Literal["shared", "local"] = "shared",
    **options: Any,
) -> Engine:
    """The engine that runs the paper's Algorithm 1, corrected: one knob for each parameter group.

    Args:
        replicas: where they live.
        max_lr, total_steps, pct_start, div_factor, final_div_factor: of the OneCycle schedule.
        window: T. spread: a of Eq. 1. warmup_steps: S_warm, by default the cycle's rise.
        auto_lr: False fans out and converges without control.
        sigma: of the estimator. beta, rate: the velocity's memory, and its weight (the paper's lambda).
        gradients: "shared" is the paper's; "local" is how it is often described.
        options: of `hdet.Engine`: seed, history, anchor.

    Raises:
        ConfigError: the declaration cannot be.

    >>> import torch, hdet
    >>> model = torch.nn.Linear(2, 1)
    >>> replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=4)
    >>> engine = hdet.paper_engine(replicas, max_lr=0.1, total_steps=100, window=10)
    >>> [round(optimizer.param_groups[0]["lr"] / 0.004, 4) for optimizer in engine.optimizers]
    [0.963, 1.037, 0.8889, 1.1111]
    """
    cycle = OneCycle(max_lr, total_steps, pct_start=pct_start, div_factor=div_factor, final_div_factor=final_div_factor)
    window = counted("window", window)
    windows = FixedWindow(window)
    warmup = round(cycle.pct_start * cycle.total_steps) if warmup_steps is None else whole("warmup_steps", warmup_steps)
    if warmup < 0:
        raise ConfigError(f"warmup_steps must be 0 or more, got {warmup}")
    begins = max(1, windows.count(0, warmup)) * window
    schedule = HeldOneCycle(**dict(cycle), held_from=begins) if auto_lr else cycle
    groups = range(len(replicas.hosts[0][1].param_groups))
    return Engine(
        replicas,
        [
            knob(
                group,
                floor=cycle.max_lr / (cycle.div_factor * cycle.final_div_factor),
                highest=cycle.max_lr,
                warmup=warmup,
                spread=spread,
                auto_lr=auto_lr,
                beta=beta,
                rate=rate,
                schedule=schedule,
            )
            for group in groups
        ],
        window=windows,
        signal=TrainingLoss(),
        evidence=evidence(sigma),
        merge=merge(),
        gradients=gradients,
        **options,
    )
