"""What is wrong with the paper and its released code, each shown by an observation; see docs/paper.md."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.controllers import Comparison, NoState


def sgd() -> SGD:
    return SGD([nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9)


def displacement(losses: list[float], sigma: float, spread: float = 1 / 9) -> float:
    """The paper's Delta over the base."""
    n = len(losses)
    levels = hdet.Symmetric(spread).levels(n)
    comparison = Comparison(levels[:, None], np.array(losses), np.zeros(1), np.ones(n))
    (estimate,), _ = hdet.Softmax(sigma).estimate(NoState(), comparison)
    return -estimate.slope


def trained(engine: hdet.Engine, steps: int, losses: list[float]) -> list[hdet.WindowRecord]:
    for _ in range(steps):
        engine.step([torch.tensor(loss) for loss in losses])
    return engine.history.windows


def engine(n: int, auto_lr: bool = True) -> hdet.Engine:
    model = nn.Linear(2, 1)
    home = hdet.replicate(model, SGD(model.parameters(), lr=0.1), n=n)
    return hdet.paper_engine(home, max_lr=0.1, total_steps=40, window=4, warmup_steps=20, auto_lr=auto_lr)


def test_1_the_printed_gamma_is_negative() -> None:
    div, final_div, windows = 25.0, 1e4, 10
    gamma = 1 - math.exp(-math.log(div / final_div) / windows)
    assert gamma == pytest.approx(-0.8206, abs=1e-4)
    assert (1 - gamma) ** windows == pytest.approx(400.0)


def test_2_one_cycle_never_reads_base_lrs() -> None:
    scaled, plain = OneCycleLR(sgd(), 0.1, total_steps=20), OneCycleLR(sgd(), 0.1, total_steps=20)
    scaled.base_lrs = [10 * rate for rate in scaled.base_lrs]
    for _ in range(10):
        for scheduler in (scaled, plain):
            scheduler.optimizer.step()
            scheduler.step()
        assert scaled.get_last_lr() == plain.get_last_lr()


def test_3_averaging_does_not_wait_for_control() -> None:
    assert [record.merged for record in trained(engine(3, auto_lr=False), 40, [1.0, 1.0, 1.0])] == [True] * 10


def test_4_nothing_is_averaged_before_the_first_window() -> None:
    made = engine(2)
    hdet.perturb(made.replicas[0].model, 0.1, replica=0)
    hdet.perturb(made.replicas[1].model, 0.1, replica=1)
    first, second = (model.get_parameter("weight") for model, _ in made.hosts)
    trained(made, 3, [1.0, 1.0])
    assert not torch.equal(first, second)
    trained(made, 1, [1.0, 1.0])
    assert torch.equal(first, second)


def test_5_sigma_decides_and_the_printed_accumulator_saturates() -> None:
    """A loss difference of 0.01 moves the rate by .5 % at sigma .1, by 11 % at .002, the released default."""
    assert displacement([2.01, 2.0], 0.1) == pytest.approx(0.0499 / 9, rel=1e-2)
    assert displacement([2.01, 2.0], 0.002) == pytest.approx(0.9866 / 9, rel=1e-3)
    # With 100 windows before control the accumulator, reset in the control branch only, is 100 windows' sum.
    assert displacement([201.0, 200.0], 0.1) == pytest.approx(1 / 9, rel=1e-3)
    # Here every window's losses are its own.
    windows = trained(engine(2), 40, [2.01, 2.0])
    assert all(record.losses == pytest.approx([2.01, 2.0]) for record in windows)


def test_6_draws_of_ranks_whose_generators_differ_are_no_permutation() -> None:
    n, collisions = 8, 0
    for trial in range(100):
        drawn = [np.random.RandomState(1000 * trial + rank).permutation(n)[rank] for rank in range(n)]
        collisions += len(set(drawn)) < n
    assert collisions > 95
    for window in range(100):  # a function of seed and window: nothing to keep in step
        levels = [np.arange(8.0)]
        design = hdet.Permutation().assign(levels, seed=0, window=window, names=["rate"], two_level=[False])
        assert sorted(design[:, 0]) == list(range(8))


def test_6_one_nan_makes_every_rate_nan_by_the_printed_softmax() -> None:
    losses = np.array([1.0, math.nan, 1.2])
    scores = (losses.mean() - losses) / 0.1
    assert np.isnan(np.exp(scores) / np.exp(scores).sum()).all()
    made = engine(3)
    for step in range(40):
        made.step([torch.tensor(1.0), torch.tensor(math.nan if step == 22 else 1.1), torch.tensor(1.2)])
    assert all(math.isfinite(base) for record in made.history for base in record.bases.values())
    assert made.history.windows[5].losses[1] is None
    assert all(loss is not None for loss in made.history.windows[6].losses)


def test_7_buffers_are_averaged_and_the_end_converges() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    home = hdet.replicate(model, SGD(model.parameters(), lr=0.1), n=2)
    made = hdet.paper_engine(home, max_lr=0.1, total_steps=6, window=4)
    means = [host.get_buffer("1.running_mean") for host, _ in home.hosts]
    for step in range(6):
        for index, replica in enumerate(made.replicas):
            replica.model(torch.full((4, 2), float(step + index)) * torch.arange(4.0)[:, None])
        if step in (0, 4):
            assert not torch.equal(*means)
        made.step([1.0, 1.0])
    assert made.finished
    assert torch.equal(*means)


def test_8_the_displacement_carries_a_factor_of_spread_and_sigma() -> None:
    slope = 1e-3
    for n, spread, sigma in ((2, 0.1, 0.1), (8, 0.1, 0.1), (8, 0.2, 0.1), (8, 0.1, 0.05)):
        losses = (2.0 + slope * hdet.Symmetric(spread).levels(n)).tolist()
        factor = spread**2 * (n + 1) / (3 * (n - 1)) / sigma
        assert displacement(losses, sigma, spread) == pytest.approx(-factor * slope, rel=1e-3)


def test_9_the_missing_control_is_data_parallel_training_under_shared_gradients() -> None:
    """Averaging without a spread changes no bit: the control row of Table 1 is its second row."""

    def train(average: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        home = hdet.replicate(model, torch.optim.AdamW(model.parameters(), lr=0.01), n=4)
        for step in range(20):
            for replica in home.local:
                x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + replica.index))
                (replica.model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            home.share_gradients()
            for _, optimizer in home.hosts:
                optimizer.step()
                optimizer.zero_grad()
            if average and step % 3 == 2:
                hdet.Mean()(home, [True] * 4)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(train(average=True), train(average=False))
