"""`hdet.find` on whole models: what it finds, what it leaves as it was, what it refuses."""

import copy
import math
import random
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hdet
from hdet.errors import ConfigError, DivergedError, StepError
from hdet.replicas.random_numbers import seeded
from hdet.trials import RateEstimate, Trial
from hdet.trials.bracket import Minimum

CENTRES = torch.randn(10, 20, generator=torch.Generator().manual_seed(0))


def examples(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    return CENTRES[labels] + 2 * torch.randn(count, 20, generator=generator), labels


def build(rate: float = 1e-3, dropout: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 10))
    head = {"params": model[4].parameters(), "lr": rate / 2}
    return model, torch.optim.AdamW([{"params": model[:4].parameters()}, head], lr=rate)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


TRAIN = [examples(32, seed) for seed in range(100, 140)]
DATA = examples(256, 7)
PROBE = hdet.Probe(loss, [examples(64, seed) for seed in range(8)])


def found(rate: float = 1e-3, **given: object) -> hdet.trials.RateEstimate:
    model, optimizer = build(rate)
    settings = {"loss": loss, "batches": TRAIN, "probe": PROBE, "total_steps": 1000, **given}
    return hdet.find(model, optimizer, **settings)


def test_the_start_hardly_matters() -> None:
    rates = [found(rate, trials=7, steps=140).learning_rate for rate in (1e-4, 1e-2, 1.0)]
    assert max(rates) < 3 * min(rates)
    assert 1e-3 < min(rates) < max(rates) < 1e-1


def test_the_rate_found_trains_better_than_one_ten_times_off() -> None:
    best = found(1e-4).learning_rate

    def trained(rate: float) -> float:
        model, optimizer = build(rate)
        for batch in TRAIN * 3:
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            return float(loss(model, examples(500, 99)))

    assert trained(best) < min(trained(best / 30), trained(best * 30))


def test_model_optimizer_and_generators_are_as_they_were() -> None:
    model, optimizer = build()
    loss(model, TRAIN[0]).backward()
    optimizer.step()  # so that there is state to change
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    gradients = [p.grad.clone() for p in model.parameters()]
    numbers = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    hdet.find(model, optimizer, loss=loss, batches=TRAIN, probe=PROBE, total_steps=200)
    after = model.state_dict(), optimizer.state_dict()
    assert all(torch.equal(after[0][name], value) for name, value in before[0].items())
    assert after[1]["param_groups"] == before[1]["param_groups"]
    for index, state in before[1]["state"].items():
        assert all(torch.equal(after[1]["state"][index][name], value) for name, value in state.items())
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), gradients, strict=True))
    assert model.training
    assert torch.equal(torch.get_rng_state(), numbers[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == numbers[1:]


def test_there_is_one_copy_at_a_time() -> None:
    model, optimizer = build()
    copies: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    alive: list[int] = []

    def counted(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        copies.add(model)
        alive.append(len(copies))
        return loss(model, batch)

    probe = hdet.Probe(counted, PROBE.batches)
    hdet.find(model, optimizer, loss=counted, batches=TRAIN, probe=probe, total_steps=200)
    assert model not in copies
    assert max(alive) == 1


def test_trials_share_batches_and_random_numbers() -> None:
    """With shuffled data and dropout, what is found twice is the same; another seed has other masks."""
    data = torch.utils.data.TensorDataset(*examples(512, 7))
    loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
    one, two, other = found(batches=loader), found(batches=loader), found(batches=loader, seed=1)
    assert one == two
    assert one.trials[0] != other.trials[0]


class Augmented(torch.utils.data.Dataset):
    """Examples with their numbers, and noise of the global generators and of generators of its own."""

    def __init__(self) -> None:
        self.torchs, self.pythons = torch.Generator().manual_seed(1), random.Random(1)
        self.numpys, self.old_numpys = np.random.default_rng(1), np.random.RandomState(1)

    def __len__(self) -> int:
        return len(DATA[1])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        noise = [random.random(), np.random.rand(), self.pythons.random(), self.numpys.random(), self.old_numpys.rand()]
        drawn = torch.tensor([index, *noise, torch.rand((), generator=self.torchs), torch.rand(())])
        return DATA[0][index] + drawn[1:].mean(), DATA[1][index], drawn

    def states(self) -> str:
        held = self.torchs.get_state().tolist(), self.pythons.getstate(), self.numpys.bit_generator.state
        return str(
            (*held, self.old_numpys.get_state()[1].tolist(), random.getstate(), np.random.get_state()[1].tolist())
        )


@pytest.mark.parametrize("kind", ["shuffle", "sampler", "batch_sampler"])
def test_what_a_loader_draws_is_the_same_in_every_trial(kind: str) -> None:
    """And its generators, which the run goes on with, are as they were."""
    data, generator = Augmented(), torch.Generator().manual_seed(3)
    sampler = torch.utils.data.RandomSampler(data, generator=generator)
    options = {
        "shuffle": {"batch_size": 32, "shuffle": True, "generator": generator},
        "sampler": {"batch_size": 32, "sampler": sampler},
        "batch_sampler": {"batch_sampler": torch.utils.data.BatchSampler(sampler, 32, drop_last=True)},
    }
    loader = torch.utils.data.DataLoader(torch.utils.data.Subset(data, range(len(data))), **options[kind])
    before = generator.get_state(), data.states()
    drawn: list[torch.Tensor] = []

    def kept(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        drawn.append(batch[2])
        return loss(model, batch[:2])

    model, optimizer = build()
    hdet.find(model, optimizer, loss=kept, batches=loader, probe=PROBE, total_steps=200, steps=12, trials=3)
    first, *others = torch.stack(drawn).unflatten(0, (3, 4))
    assert all(torch.equal(first, other) for other in others)
    assert torch.equal(generator.get_state(), before[0])
    assert data.states() == before[1]


def test_a_trial_is_the_run_compressed() -> None:
    """At the given rate a trial is plain training over the schedule's shape, bit for bit; groups keep their ratio."""
    schedule = hdet.schedules.OneCycle(3.0, total_steps=900)
    trials = found(0.01, schedule=schedule, steps=30, trials=3, micro_batches=2, clip=0.5).trials
    model, optimizer = build(0.01, dropout=0.1)
    with seeded([], "hdet.find:0"):
        for step in range(10):
            for group, ratio in zip(optimizer.param_groups, (1.0, 0.5), strict=True):
                group["lr"] = 0.01 * (schedule(round(step * 899 / 9)) / 3.0) * ratio
            for number in (2 * step, 2 * step + 1):
                (loss(model, TRAIN[number]) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert trials[0] == Trial(0.01, tuple(PROBE.measure(model, 0).tolist()))


def test_a_schedule_without_an_end_is_taken_over_the_run() -> None:
    """A warm-up of 300 of 1000 steps is one of three in ten of a trial; its peak is what a trial's rate is of."""
    endless = hdet.schedules.LinearWarmup(hdet.schedules.Constant(5.0), 300)
    known = hdet.schedules.Replay([endless(step) for step in range(1000)])
    assert (
        found(0.01, schedule=endless, steps=30, trials=3).trials
        == found(0.01, schedule=known, steps=30, trials=3).trials
    )


def test_too_large_rates_end_early_and_are_no_answer() -> None:
    model = nn.Linear(20, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e3)
    square = lambda model, batch: model(batch[0]).square().mean()  # noqa: E731
    probe = hdet.Probe(square, [examples(16, seed) for seed in range(4)])
    told = hdet.find(model, optimizer, loss=square, batches=TRAIN, probe=probe, total_steps=10_000, trials=9)
    assert told.trials[0] == Trial(1e3, None)
    assert math.isfinite(min(told.trials, key=lambda one: one.loss).loss)
    assert told.learning_rate < 1.0
    assert "not finite" in str(told)


@pytest.mark.parametrize("rate", [1e9, 30.0])  # of which the second diverges to finite losses
def test_where_every_trial_diverges_there_is_no_answer(rate: float) -> None:
    model = nn.Linear(20, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    square = lambda model, batch: model(batch[0]).square().mean()  # noqa: E731
    probe = hdet.Probe(square, [examples(16, seed) for seed in range(4)])
    with pytest.raises(DivergedError, match=r"all 3 trials diverged, at learning rates from .* begin at a lower one"):
        hdet.find(model, optimizer, loss=square, batches=TRAIN, probe=probe, total_steps=60, trials=3)


def test_steps_and_trials_are_what_was_asked_for() -> None:
    told = found(steps=40, trials=4)
    assert (len(told.trials), told.trial_steps, told.total_steps) == (4, 10, 1000)
    assert len({trial.rate for trial in told.trials}) == 4


def test_the_answer_in_words_yaml_and_a_picture() -> None:
    trials = Trial(0.1, (1.0, 1.2)), Trial(3e3, None)
    told = hdet.trials.RateEstimate(0.1, 20, 640, Trial(0.0, (2.0, 2.2)), trials, Minimum(6e-6, 3e-6, None, "flat"))
    assert told.learning_rate == pytest.approx(3e-6)
    assert told.low == pytest.approx(3e-6 / 2 / 12)
    assert told.to_dict()["high"] is None
    assert "learning rate 0.1 -> 3e-06 (between 1.25e-07 and ?), flat" in str(told)
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(told.to_yaml()) == {"optimizer": {"lr": 3e-6}}
    pytest.importorskip("matplotlib")
    assert told.plot().axes[0].get_xscale() == "log"
    diverged = replace(told, trials=(*trials, Trial(1e2, (1e6, 1e6))))
    assert diverged.plot().axes[0].get_ylim()[1] == pytest.approx(2.1 + 0.5 * (2.1 - 1.1))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"trials": 2}, "trials must be 3 or more"),
        ({"trials": 3.5}, "trials must be of type int, got 3.5"),
        ({"total_steps": "300"}, "total_steps must be of type int, got '300'"),
        ({"micro_batches": 0}, "micro_batches must be at least 1, got 0"),
        ({"steps": 9}, "fewer than 2 a trial"),
        ({"steps": 10**23}, "make each longer than the run of"),
        ({"probe": PROBE.loss}, "probe must be an hdet.Probe"),
        ({"batches": iter(TRAIN)}, "can be gone through once"),
        ({"batches": 3}, "batches is an iterable or a function"),
        ({"batches": lambda: iter(TRAIN)}, "as a function, takes a number"),
        ({"schedule": hdet.schedules.Constant(0.0)}, "the schedule is 0 at every step"),
        ({"schedule": lambda step: 1e-3}, "schedule must be of type Schedule or None"),
        ({"clip": 0}, "clip is the largest norm of the gradient, above 0, got 0"),
        ({"clip": "1"}, "clip is the largest norm of the gradient, above 0, got '1'"),
        ({"clip": True}, "clip is the largest norm of the gradient, above 0, got True"),
        ({"clip": math.nan}, "clip is the largest norm of the gradient, above 0, got nan"),
        ({"loss": lambda model, batch: model(batch[0])}, r"a tensor of one number; got a tensor of shape \(32, 10\)"),
        ({"loss": lambda model, batch: 1.0}, "a tensor of one number; got float"),
        ({"loss": lambda model, batch: loss(model, batch).detach()}, "gave a loss that no gradient can be taken of"),
        ({"loss": None}, r"loss is a function loss\(model, batch\), got NoneType"),
        ({"probe": hdet.Probe(lambda _, batch: batch[0].mean(), PROBE.batches)}, "the same to the last bit before and"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        found(**given)


def test_a_loss_that_is_not_finite_to_begin_with_is_no_matter_of_rates() -> None:
    with pytest.raises(DivergedError, match="the training loss is not finite in a trial's first step"):
        found(loss=lambda model, batch: loss(model, batch) * float("nan"))


def test_a_probe_that_is_not_finite_is_told_before_anything_trains() -> None:
    spoilt = [(PROBE.batches[0][0] * math.nan, PROBE.batches[0][1]), *PROBE.batches[1:]]
    with pytest.raises(DivergedError, match="the held-out loss is not finite before any training"):
        found(probe=hdet.Probe(loss, spoilt), loss=lambda model, batch: pytest.fail("a trial was made"))


def test_a_loss_of_another_model_is_refused() -> None:
    """The model that it calls in place of the copy is left as it was, its gradients and BatchNorm's statistics too."""
    model, optimizer = build()
    loss(model, TRAIN[0]).backward()
    gradients = [p.grad for p in model.parameters()]
    kept = copy.deepcopy((model.state_dict(), [gradient.clone() for gradient in gradients]))
    probe = hdet.Probe(lambda _, batch: loss(model, batch), PROBE.batches)
    settings = {"batches": TRAIN, "probe": probe, "total_steps": 500}
    with pytest.raises(ConfigError, match="must use the model that it is given, a copy that a trial trains"):
        hdet.find(model, optimizer, loss=lambda _, batch: loss(model, batch), **settings)
    assert all(torch.equal(value, kept[0][name]) for name, value in model.state_dict().items())
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    assert all(map(torch.equal, gradients, kept[1]))


class Sharpness(torch.optim.SGD):
    """An optimizer that looks at the loss again within its step."""

    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise ValueError("sharpness needs a closure")
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (torch.optim.LBFGS, "L-BFGS looks at the loss many times in one step"),
        (Sharpness, r"Sharpness steps with a closure only \(sharpness needs a closure\)"),
    ],
)
def test_an_optimizer_that_needs_a_closure_is_refused(kind: Any, said: str) -> None:
    model = nn.Linear(20, 10)
    with pytest.raises(ConfigError, match=said):
        hdet.find(model, kind(model.parameters(), lr=0.1), loss=loss, batches=TRAIN, probe=PROBE, total_steps=500)


def test_no_batches_are_told() -> None:
    with pytest.raises(StepError, match="batches is empty"):
        found(batches=[])


def test_a_model_in_use_is_refused() -> None:
    model, optimizer = build()
    settings = {"loss": loss, "batches": TRAIN, "probe": PROBE, "total_steps": 100}
    search = hdet.attach(model, optimizer, probe=PROBE, total_steps=10, quiet=True)
    with pytest.raises(ConfigError, match=r"call hdet\.find before hdet\.attach"):
        hdet.find(model, optimizer, **settings)
    search.detach()
    model.eval()
    with pytest.raises(ConfigError, match="the model is in eval mode, in which it would not train"):
        hdet.find(model, optimizer, **settings)
    model.train()
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with pytest.raises(ConfigError, match="before the scheduler is made"):
        hdet.find(model, optimizer, **settings)


def test_a_group_at_rate_0_stays_there() -> None:
    model, optimizer = build()
    optimizer.param_groups[0]["lr"] = 0.0
    told = hdet.find(model, optimizer, loss=loss, batches=TRAIN, probe=PROBE, total_steps=500)
    assert told.given == 5e-4
    optimizer.param_groups[1]["lr"] = 0.0
    with pytest.raises(ConfigError, match="learning rate of 0"):
        hdet.find(model, optimizer, loss=loss, batches=TRAIN, probe=PROBE, total_steps=500)


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        (torch.tensor(1), r"holds lr as a tensor of 1 elements and type torch\.int64"),
        (torch.tensor([0.1, 0.2]), r"holds lr as a tensor of 2 elements and type torch\.float32"),
    ],
)
def test_a_rate_that_cannot_hold_another_is_refused(rate: torch.Tensor, said: str) -> None:
    """Into an integer 0.25 is written as 0, so that a trial at it trains nothing."""
    model, optimizer = build()
    optimizer.param_groups[0]["lr"] = rate
    with pytest.raises(ConfigError, match=said):
        hdet.find(model, optimizer, loss=loss, batches=TRAIN, probe=PROBE, total_steps=500)


def test_of_several_groups_it_is_said_whose_rate_it_is() -> None:
    estimate = found(0.01)
    assert estimate.ratios == (1.0, 0.5)
    first, second = f"{estimate.learning_rate:.3g}", f"{estimate.learning_rate / 2:.3g}"
    told = f"of the first group with a rate; the groups in turn: {first}, {second}"
    assert told in str(estimate)
    assert estimate.to_yaml().endswith(told)


@pytest.mark.parametrize(
    ("steps", "verdict", "comment"),
    [
        (2, "settled", "  # not settled: trials of 2 steps"),
        (12, "still rising", "  # not settled: still rising"),
        (12, "flat", ""),
    ],
)
def test_what_is_to_be_pasted_says_what_it_is_worth(steps: int, verdict: Any, comment: str) -> None:
    estimate = RateEstimate(0.1, steps, 32 * steps, Trial(0.0, (2.3, 2.4)), (), Minimum(0.4, 0.2, 0.8, verdict))
    assert estimate.to_yaml() == f"optimizer:\n  lr: 0.2{comment}"
    assert ("too short: trials this short mislead; give at least 12 steps a trial" in str(estimate)) == (steps < 12)
    assert (estimate.verdict == "too short") == (steps < 12)


@pytest.mark.filterwarnings("ignore:.*prototype")
@pytest.mark.parametrize(
    "odd",
    [
        torch.zeros(1).expand(4),
        torch.ones(4, dtype=torch.complex64).conj(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        torch.inference_mode()(lambda: torch.ones(4))(),
    ],
    ids=["expanded", "conjugated", "jagged", "made in inference"],
)
def test_a_buffer_that_cannot_be_written_over_is_let_be(odd: torch.Tensor) -> None:
    model, optimizer = build()
    model.register_buffer("odd", odd)
    hdet.find(model, optimizer, loss=loss, batches=TRAIN, probe=PROBE, total_steps=100)
    assert model.odd is odd
