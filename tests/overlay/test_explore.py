"""explore: HDET around any torch scheduler."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scheduler_job import QUIET, TOTAL, WRAPS, Job, first_rates, optimizer
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

import hdet
from hdet.controllers import Hold
from hdet.errors import ConfigError, StepError
from hdet.spaces import Relative
from hdet.spreads import Symmetric

pytestmark = QUIET


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "cosine": lambda made: CosineAnnealingLR(made, 20),
    "exponential": lambda made: ExponentialLR(made, 0.9),
    "lambda": lambda made: LambdaLR(made, lambda t: min(t / 5, 1.0)),
    "one cycle": lambda made: OneCycleLR(made, 0.3, total_steps=30),
    "chained": lambda made: ChainedScheduler([ConstantLR(made, 0.5, total_iters=3), ExponentialLR(made, 0.9)]),
    "sequential": lambda made: SequentialLR(
        made, [LinearLR(made, 0.1, total_iters=4), CosineAnnealingLR(made, 10)], milestones=[4]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_scheduler_s_own_rates_are_the_bases(name: str) -> None:
    """Recursive schedulers must never see a replica's rate, or the levels would compound."""
    hold = hdet.LearningRate(space=Relative(), spread=Symmetric(0.3), controller=Hold())
    made = Job(lambda made, home: None).home.hosts[0][1]
    plain = SCHEDULERS[name](made)
    job = Job(lambda made, home: hdet.explore(SCHEDULERS[name](made), knob=hold, window=3, replicas=home))
    assert isinstance(job.scheduler, LRScheduler)
    for step in range(15):
        (rates,) = job.train(until=step + 1)
        expected = [float(group["lr"]) for group in made.param_groups]
        np.testing.assert_allclose(np.mean(rates, axis=0), expected, rtol=1e-12, atol=1e-18)
        plain.step()
        assert list(job.scheduler.bases.values()) == [float(group["lr"]) for group in made.param_groups]
        assert job.scheduler.get_last_lr() == [g["lr"] for g in job.home.hosts[0][1].param_groups]


def test_reduce_on_plateau_takes_its_metric_beside_the_loss() -> None:
    hold = hdet.LearningRate(space=Relative(), spread=Symmetric(0.3), controller=Hold())
    model = nn.Linear(2, 1)
    made = SGD(model.parameters(), lr=0.1)
    scheduler = hdet.explore(
        ReduceLROnPlateau(made, factor=0.5, patience=0), knob=hold, window=2, replicas=hdet.replicate(model, made, n=2)
    )
    for metric in (1.0, 2.0, 3.0):
        scheduler.step([torch.zeros(())] * 2, metric)
    assert scheduler.bases["learning_rate[0]"] == 0.1 * 0.5 * 0.5


def test_what_is_learned_is_a_factor_on_top_of_the_scheduler() -> None:
    job = Job(WRAPS["cosine"])
    job.train(until=12)
    knob = job.scheduler.engine.knobs[0]
    assert knob.shift != 0.0
    before = knob.shift
    (first,) = job.train(until=13)
    (second,) = job.train(until=14)
    assert knob.shift == before
    plain = CosineAnnealingLR(SGD([nn.Parameter(torch.ones(1))], lr=0.1), TOTAL)
    course_ = []
    for _ in range(14):
        course_.append(plain.optimizer.param_groups[0]["lr"])
        plain.step()
    assert np.mean(first, axis=0)[0] == pytest.approx(course_[12] * (1 + before))
    assert np.mean(second, axis=0)[0] == pytest.approx(course_[13] * (1 + before))


def test_alone_explore_only_steps_the_scheduler() -> None:
    made, other = optimizer(), optimizer()
    scheduler, plain = hdet.explore(CosineAnnealingLR(made, 10)), CosineAnnealingLR(other, 10)
    for _ in range(5):
        scheduler.step(torch.zeros(()))
        plain.step()
        assert [g["lr"] for g in made.param_groups] == [g["lr"] for g in other.param_groups]
    again = hdet.explore(CosineAnnealingLR(optimizer(), 10))
    again.load_state_dict(scheduler.state_dict())
    assert again.last_epoch == 5
    with pytest.raises(StepError, match="this scheduler does not explore, so it has no engine"):
        scheduler.engine  # noqa: B018


def test_explore_says_what_it_cannot_take() -> None:
    with pytest.raises(ConfigError, match="takes a torch LR scheduler, got int"):
        hdet.explore(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="leave them out"):
        hdet.explore(CosineAnnealingLR(optimizer(), 10), knob=hdet.LearningRate(groups=0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"knob": "learning_rate"}, "knob must be of type LearningRate, got 'learning_rate'"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"total_steps": "10"}, "total_steps must be of type int, got '10'"),
        ({"total_steps": True}, "total_steps must be of type int, got True"),
    ],
)
def test_explore_refuses_what_cannot_be_even_in_one_process(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hdet.explore(CosineAnnealingLR(optimizer(), 10), **options)


def test_alone_explore_takes_whatever_torch_takes() -> None:
    for made in (SGD([torch.ones(2)], lr=0.1), SGD([nn.Parameter(torch.ones(2))], lr=1000.0)):
        scheduler = hdet.explore(ExponentialLR(made, 0.5))
        scheduler.step()
        assert made.param_groups[0]["lr"] in (0.05, 500.0)


def test_a_rate_above_the_default_bounds_widens_them() -> None:
    model = nn.Linear(2, 1)
    made = SGD(model.parameters(), lr=1000.0)
    home = hdet.replicate(model, made, n=2)
    scheduler = hdet.explore(ExponentialLR(made, 0.5), replicas=home)
    assert sorted(first_rates(scheduler.engine.optimizers)) == pytest.approx([1000 * 8 / 9, 1000 * 10 / 9])
    with pytest.raises(ConfigError, match="outside the bounds"):
        hdet.explore(ExponentialLR(made, 0.5), knob=hdet.LearningRate(bounds=(0.0, 10.0)), replicas=home)


def test_what_is_not_its_own_is_the_scheduler_s() -> None:
    for scheduler in (
        hdet.explore(CosineAnnealingLR(optimizer(), 10)),
        Job(lambda made, home: hdet.explore(CosineAnnealingLR(made, 10), replicas=home)).scheduler,
    ):
        assert scheduler.base_lrs == scheduler.scheduler.base_lrs
        assert (scheduler._step_count, scheduler.T_max) == (1, 10)
        assert scheduler._last_lr == scheduler.scheduler._last_lr
        with pytest.raises(AttributeError, match="'CosineAnnealingLR' object has no attribute 'nothing'"):
            scheduler.nothing  # noqa: B018


def test_a_warning_names_the_line_of_the_loop() -> None:
    job = Job(lambda made, home: hdet.explore(CosineAnnealingLR(made, 10), replicas=home))
    for scheduler in (hdet.explore(CosineAnnealingLR(optimizer(), 10)), job.scheduler):
        with pytest.warns(UserWarning, match="before `optimizer.step") as caught:
            scheduler.step()
        assert [warning.filename for warning in caught] == [__file__]
