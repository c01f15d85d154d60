"""What is wrong with the paper and its released code, each shown by an observation; see docs/paper.md.

`Released` transcribes the lines at fault and nothing else; each test shows the fault there, and hdet without it.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.controllers import NoState
from hdet.controllers.estimators import Comparison
from hdet.designs import Permutation
from hdet.estimators import Softmax
from hdet.merges import Mean
from hdet.schedules import OneCycle
from hdet.spreads import Symmetric

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")


def sgd() -> SGD:
    return SGD([nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9)


def displacement(losses: list[float], sigma: float, spread: float = 1 / 9) -> float:
    """The paper's Delta over the base."""
    n = len(losses)
    levels = Symmetric(spread).levels(n)
    comparison = Comparison(levels[:, None], np.array(losses), np.zeros(1), np.ones(n))
    (estimate,), _ = Softmax(sigma).estimate(NoState(), comparison)
    return -estimate.slope


class Released(OneCycleLR):
    """The released scheduler on one of several ranks, reduced to the lines that the errata are about.

    The ranks live in one process: `everyone` lists their models, for what would be an all-reduce.
    """

    def __init__(
        self, optimizer: Optimizer, rank: int, everyone: list[nn.Module], *,
        window: int = 4, warmup: int = 8, auto_lr: bool = True, seed: int | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.window, self.warmup, self.auto_lr = rank, window, warmup, auto_lr
        self.everyone, self.accumulated, self.steps = everyone, 0.0, 0
        super().__init__(optimizer, 0.1, total_steps=40)
        if seed is not None:
            torch.manual_seed(seed)
        self.permutation = torch.randperm(len(everyone)).tolist()
        self.base_lrs = [rate * self.multiplier() for rate in self.base_lrs]  # which OneCycleLR does not read
        if self.steps % self.window == 0:
            self.converge()

    def multiplier(self) -> float:
        n = len(self.everyone)
        return float(1 + Symmetric(1 / 9).levels(n)[self.permutation[self.rank]])

    def converge(self) -> None:
        with torch.no_grad():
            for tensors in zip(*(model.parameters() for model in self.everyone), strict=True):  # and no buffers
                mean = torch.stack(list(tensors)).mean(0)
                for tensor in tensors:
                    tensor.copy_(mean)

    def train_step(self, loss: Any) -> float | None:
        """One `step(loss)`; the window-mean loss that control is told, where it is told any."""
        self.steps += 1
        told = None
        if self.steps < self.warmup:
            super().step()
        if not self.auto_lr:
            return None
        self.accumulated += loss.item()
        if self.steps % self.window == 0:
            self.converge()
            if self.steps >= self.warmup:
                told = self.accumulated / self.window
                self.accumulated = 0.0
                self.permutation = torch.randperm(len(self.everyone)).tolist()
                for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
                    group["lr"] = base * self.multiplier()
        return told


def released(n: int = 2, seed: int | None = 0, **options: Any) -> tuple[list[nn.Module], list[Released]]:
    models: list[nn.Module] = [nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(n)]
    return models, [
        Released(SGD(model.parameters(), lr=0.1, momentum=0.9), rank, models, seed=seed, **options)
        for rank, model in enumerate(models)
    ]


def move_apart(models: list[nn.Module]) -> None:
    with torch.no_grad():
        for index, model in enumerate(models):
            for parameter in model.parameters():
                parameter.fill_(float(index))


def apart(models: list[nn.Module]) -> bool:
    first, *others = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models]
    return any(not torch.equal(first, other) for other in others)


@pytest.fixture(autouse=True)
def _own_generator() -> Any:
    """`Released` seeds the global generator."""
    with torch.random.fork_rng(devices=[]):
        yield


def drop_in(n: int = 2, model: nn.Module | None = None) -> hdet.OneCycleHDET:
    model = model if model is not None else nn.Linear(2, 1)
    made = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hdet.OneCycleHDET(
        made, 0.1, total_steps=40, spread=1 / 9, window=4, auto_lr_warmup=8, replicas=hdet.replicate(model, made, n=n)
    )


def in_force(scheduler: hdet.OneCycleHDET) -> list[float]:
    """The rate that each replica steps with."""
    rates: list[float] = []
    for made in scheduler.engine.optimizers:
        made.register_step_pre_hook(lambda made, *_: rates.append(made.param_groups[0]["lr"]))
        made.step()
    return rates


def trained(engine: hdet.Engine, steps: int, losses: list[float]) -> list[hdet.history.WindowRecord]:
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
    _, schedulers = released(n=3)
    assert len({tuple(scheduler.base_lrs) for scheduler in schedulers}) == 3
    for _ in range(7):
        assert len({scheduler.get_last_lr()[0] for scheduler in schedulers}) == 1  # no fan-out before control
        for scheduler in schedulers:
            scheduler.train_step(torch.ones(()))
    assert len(set(in_force(drop_in(n=3)))) == 3


def test_3_averaging_waits_for_auto_lr() -> None:
    models, schedulers = released(auto_lr=False)
    move_apart(models)
    for _ in range(40):
        for scheduler in schedulers:
            scheduler.train_step(torch.ones(()))
    assert apart(models)
    made = engine(2, auto_lr=False)
    hosted = [model for model, _ in made.hosts]
    move_apart(hosted)
    assert [record.merged for record in trained(made, 40, [1.0, 1.0])] == [True] * 10
    assert not apart(hosted)


def test_4_the_constructor_averages_the_warm_start_away() -> None:
    models: list[nn.Module] = [nn.Linear(2, 1) for _ in range(2)]
    move_apart(models)
    Released(SGD(models[0].parameters(), lr=0.1, momentum=0.9), 0, models)
    assert not apart(models)
    model = nn.Linear(2, 1)
    home = hdet.replicate(model, SGD(model.parameters(), lr=0.1), n=2)
    hdet.perturb(home, 0.1)
    made = hdet.paper_engine(home, max_lr=0.1, total_steps=40, window=4)
    hosted = [model for model, _ in made.hosts]
    trained(made, 3, [1.0, 1.0])
    assert apart(hosted)
    trained(made, 1, [1.0, 1.0])
    assert not apart(hosted)


def test_5_sigma_decides() -> None:
    """A loss difference of 0.01 moves the rate by .5 % at sigma .1, by 11 % at .002, the released default."""
    assert displacement([2.01, 2.0], 0.1) == pytest.approx(0.0499 / 9, rel=1e-2)
    assert displacement([2.01, 2.0], 0.002) == pytest.approx(0.9866 / 9, rel=1e-3)


def test_5_the_accumulator_is_reset_in_the_control_branch_only() -> None:
    _, schedulers = released(warmup=32)
    told = [[scheduler.train_step(torch.tensor(loss)) for scheduler, loss in zip(schedulers, (2.01, 2.0), strict=True)]
            for _ in range(40)]  # fmt: skip
    first, second, _ = (row for row in told if row[0] is not None)
    assert first == pytest.approx([8 * 2.01, 8 * 2.0])  # eight windows' sum in the place of a mean
    assert second == pytest.approx([2.01, 2.0])
    # With 100 windows before control the first displacement is saturated, whatever the losses.
    assert displacement([201.0, 200.0], 0.1) == pytest.approx(1 / 9, rel=1e-3)
    windows = trained(engine(2), 40, [2.01, 2.0])
    assert all(record.losses == pytest.approx([2.01, 2.0]) for record in windows)


def test_5_line_5_overwrites_the_controlled_rate() -> None:
    cycle = OneCycle(0.1, total_steps=40)
    rate, rates = 0.5 * cycle(20), []  # as control leaves it
    for t in range(20, 24):
        rate = cycle(t)  # line 5, at every step
        rates.append(rate)
    assert rates == [cycle(t) for t in range(20, 24)]
    scheduler = drop_in()
    bases = []
    for _ in range(16):
        bases.append(scheduler.bases["learning_rate[0]"])
        scheduler.step([torch.tensor(1.0), torch.tensor(1.1)])
    assert len(set(bases[8:12])) == 1
    assert bases[8] != bases[7]
    assert len(set(bases[:8])) == 8


def test_6_it_reseeds_the_global_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    released(seed=0)
    drawn = torch.rand(())
    torch.manual_seed(2)  # another rank, seeded otherwise by its user
    released(seed=0)
    assert torch.equal(torch.rand(()), drawn)  # dropout is the same on all of them
    model = nn.Linear(2, 1)
    torch.manual_seed(1)
    scheduler = drop_in(model=model)
    for _ in range(9):
        scheduler.step([torch.ones(())] * 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_6_after_a_resume_every_rank_is_rank_0_and_draws_anew() -> None:
    def run(schedulers: list[Released], steps: int) -> list[list[int]]:
        for _ in range(steps):
            for scheduler in schedulers:
                scheduler.train_step(torch.ones(()))
        return [scheduler.permutation for scheduler in schedulers]

    _, schedulers = released(n=8)
    run(schedulers, 12)
    # torch's state_dict: the whole of __dict__, and not the generator
    state = {key: copy.deepcopy(value) for key, value in schedulers[0].state_dict().items() if key != "everyone"}
    going_on = run(schedulers, 4)
    _, again = released(n=8)
    for scheduler in again:
        scheduler.load_state_dict(state)
    assert [scheduler.rank for scheduler in again] == [0] * 8
    assert run(again, 4) != going_on

    scheduler = drop_in(n=8)
    for _ in range(12):
        scheduler.step([torch.ones(())] * 8)
    state = copy.deepcopy(scheduler.state_dict())
    torch.manual_seed(5)
    other = drop_in(n=8)
    other.load_state_dict(state)
    for made in (scheduler, other):
        for _ in range(4):
            made.step([torch.ones(())] * 8)
    rates = [in_force(each) for each in (scheduler, other)]
    assert rates[0] == rates[1]
    assert len(set(rates[0])) == 8


def test_6_it_crashes_without_a_loss() -> None:
    _, (scheduler, _) = released()
    with pytest.raises(AttributeError, match="item"):
        scheduler.train_step(None)
    ours = drop_in()
    for _ in range(9):
        ours.step()
    assert [record.moves["learning_rate[0]"] for record in ours.engine.history] == [0.0, 0.0]


def test_6_draws_of_ranks_whose_generators_differ_are_no_permutation() -> None:
    n, collisions = 8, 0
    for trial in range(100):
        chosen = []
        for rank in range(n):
            torch.manual_seed(1000 * trial + rank)  # after a step of dropout, say, which draws other numbers on each
            chosen.append(torch.randperm(n).tolist()[rank])  # the line of `Released`
        collisions += len(set(chosen)) < n
    assert collisions > 95
    for window in range(100):  # a function of seed and window: nothing to keep in step
        levels = [np.arange(8.0)]
        design = Permutation().assign(levels, seed=0, window=window, names=["rate"], two_level=[False])
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


def test_7_buffers_are_not_averaged_and_the_end_does_not_converge() -> None:
    models, schedulers = released()
    for step in range(38):
        for index, (model, scheduler) in enumerate(zip(models, schedulers, strict=True)):
            model(torch.full((4, 2), float(step + index)) * torch.arange(4.0)[:, None])
            scheduler.train_step(torch.ones(()))
        if step == 36:
            move_apart(models)
    assert apart(models)
    assert not torch.equal(*(model.get_buffer("1.running_mean") for model in models))

    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    home = hdet.replicate(model, SGD(model.parameters(), lr=0.1), n=2)
    made = hdet.paper_engine(home, max_lr=0.1, total_steps=6, window=4)
    means = [host.get_buffer("1.running_mean") for host, _ in home.hosts]
    for step in range(6):
        for index, replica in enumerate(made.replicas):
            replica.model(torch.full((4, 2), float(step + index)) * torch.arange(4.0)[:, None])
        if step in (0, 4):
            assert not torch.equal(*means)
            move_apart([host for host, _ in home.hosts])
        made.step([1.0, 1.0])
    assert made.finished
    assert torch.equal(*means)
    assert not apart([host for host, _ in home.hosts])


def test_7_momentum_freezes_where_control_starts() -> None:
    _, (scheduler, _) = released()
    ours, momenta = drop_in(), []
    for _ in range(16):
        momenta.append((scheduler.optimizer.param_groups[0]["momentum"], ours.optimizer.param_groups[0]["momentum"]))
        scheduler.train_step(torch.ones(()))
        ours.step([torch.ones(())] * 2)
    theirs, own = zip(*momenta, strict=True)
    assert len(set(theirs[8:])) == 1
    assert len(set(own[8:])) == 8


def test_8_the_displacement_carries_a_factor_of_spread_and_sigma() -> None:
    slope = 1e-3
    for n, spread, sigma in ((2, 0.1, 0.1), (8, 0.1, 0.1), (8, 0.2, 0.1), (8, 0.1, 0.05)):
        losses = (2.0 + slope * Symmetric(spread).levels(n)).tolist()
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
                home.mean([True] * 4, Mean().optimizer)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(train(average=True), train(average=False))
