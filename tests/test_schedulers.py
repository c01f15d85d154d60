"""OneCycleHDET: OneCycleLR bit for bit until it explores; then the engine's cycle under torch's loop."""

import copy
import gc
import io
import math
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
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
from hdet.errors import CheckpointError, ConfigError, StepError

OWN = {"optimizer", "_exploration", "_declared", "_began"}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """These loops often step a scheduler and not its optimizer; the tests of the warning switch it on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of")
        warnings.filterwarnings("ignore", message="To get the last learning rate")
        warnings.filterwarnings("ignore", message="The epoch parameter")
        yield


def optimizer(kind: str = "sgd", groups: int = 2, lr: float | Tensor = 0.05) -> Optimizer:
    parameters = [
        {"params": [nn.Parameter(torch.ones(3))], **({} if index else {"lr": 0.5})} for index in range(groups)
    ]
    if kind == "adamw":
        return AdamW(parameters, lr=lr)
    return SGD(parameters, lr=lr, momentum=0.5)


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


# -- what PyTorch's own tests ask of OneCycleLR, at spread 0 --------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, ValueError),
        ({"total_steps": 0}, ValueError),
        ({"total_steps": -1}, ValueError),
        ({"total_steps": 1.5}, ValueError),
        ({"epochs": 10}, ValueError),
        ({"epochs": -1, "steps_per_epoch": 10}, ValueError),
        ({"epochs": 10, "steps_per_epoch": -1}, ValueError),
        ({"epochs": 1.5, "steps_per_epoch": 10}, ValueError),
        ({"total_steps": 10, "pct_start": 1.1}, ValueError),
        ({"total_steps": 10, "pct_start": -0.1}, ValueError),
        ({"total_steps": 10, "pct_start": 1}, ValueError),
        ({"total_steps": 10, "anneal_strategy": "CATS"}, ValueError),
        ({"total_steps": 10, "max_lr": [1e-3]}, ValueError),
        ({"total_steps": 10, "base_momentum": [0.1]}, ValueError),
        ({"total_steps": 10, "max_momentum": [0.1, 0.2, 0.3]}, ValueError),
        ({"total_steps": 10, "last_epoch": 3}, KeyError),
        ({"total_steps": 10, "bogus": 3}, TypeError),
    ],
)
def test_construction_errors_are_torch_s(arguments: dict[str, Any], error: type[Exception]) -> None:
    arguments = {"max_lr": 1e-3, **arguments}
    with pytest.raises(error) as theirs:
        OneCycleLR(optimizer(), **arguments)
    with pytest.raises(error) as ours:
        hdet.OneCycleHDET(optimizer(), **arguments)
    assert str(ours.value).replace("OneCycleHDET", "OneCycleLR") == str(theirs.value)


def test_what_is_no_optimizer_or_has_no_momentum_is_refused_as_by_torch() -> None:
    with pytest.raises(TypeError, match="is not an Optimizer"):
        hdet.OneCycleHDET([], 1e-3, total_steps=10)  # type: ignore[arg-type]
    rprop = torch.optim.Rprop([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="must support momentum or beta1"):
        hdet.OneCycleHDET(rprop, 1e-3, total_steps=10)
    assert hdet.OneCycleHDET(rprop, 1e-3, total_steps=10, cycle_momentum=False).total_steps == 10


def test_linear_annealing_by_hand() -> None:
    made = optimizer()
    scheduler = hdet.OneCycleHDET(
        made, 25, total_steps=10, div_factor=25, final_div_factor=1, pct_start=0.5, anneal_strategy="linear",
        base_momentum=1, max_momentum=22,
    )  # fmt: skip
    rates, momenta = (
        [1, 7, 13, 19, 25, 20.2, 15.4, 10.6, 5.8, 1],
        [22, 16.75, 11.5, 6.25, 1, 5.2, 9.4, 13.6, 17.8, 22],
    )
    for rate, momentum in zip(rates, momenta, strict=True):
        for group in made.param_groups:
            assert group["lr"] == pytest.approx(rate)
            assert group["momentum"] == pytest.approx(momentum)
        made.step()
        scheduler.step(torch.zeros(()))


def test_three_phases_by_hand() -> None:
    made = optimizer()
    scheduler = hdet.OneCycleHDET(
        made, 25, total_steps=10, div_factor=25, final_div_factor=10, pct_start=0.4, anneal_strategy="linear",
        three_phase=True, base_momentum=1, max_momentum=22,
    )  # fmt: skip
    rates, momenta = [1, 9, 17, 25, 17, 9, 1, 0.7, 0.4, 0.1], [22, 15, 8, 1, 8, 15, 22, 22, 22, 22]
    for rate, momentum in zip(rates, momenta, strict=True):
        assert made.param_groups[0]["lr"] == pytest.approx(rate)
        assert made.param_groups[0]["momentum"] == pytest.approx(momentum)
        scheduler.step()


def test_cosine_by_hand() -> None:
    made = optimizer()
    scheduler = hdet.OneCycleHDET(made, 25, total_steps=10, div_factor=25, final_div_factor=10, pct_start=0.3)

    def between(start: float, end: float, x: float) -> float:
        return end + (start - end) / 2 * (math.cos(x * math.pi) + 1)

    rates = [1, 13, 25, *(between(25, 0.1, x / 7) for x in range(1, 8))]
    for rate in rates:
        assert made.param_groups[1]["lr"] == pytest.approx(rate)
        scheduler.step()


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["sgd", "adamw"]),
    max_lr=st.one_of(st.floats(1e-8, 10), st.tuples(st.floats(1e-8, 10), st.floats(1e-8, 10)).map(list)),
    total=st.integers(2, 40),
    pct_start=st.floats(0, 1),
    strategy=st.sampled_from(["cos", "linear"]),
    cycle=st.booleans(),
    momenta=st.tuples(st.floats(0, 0.95), st.floats(0, 0.95)),
    div=st.floats(1, 1000),
    final_div=st.floats(1, 1e6),
    three=st.booleans(),
    extras=st.sampled_from([{}, {"spread": 0.2}, {"window": 3, "auto_lr": False}]),
)
def test_without_exploration_it_is_one_cycle_lr_bit_for_bit(
    kind: str, max_lr: Any, total: int, pct_start: float, strategy: Any, cycle: bool,
    momenta: tuple[float, float], div: float, final_div: float, three: bool, extras: dict[str, Any],
) -> None:  # fmt: skip
    """Rates, momenta, group entries, attributes, state; with spread 0, or one process to spread over."""
    arguments = {
        "max_lr": max_lr, "total_steps": total, "pct_start": pct_start, "anneal_strategy": strategy,
        "cycle_momentum": cycle, "base_momentum": momenta[0], "max_momentum": momenta[1], "div_factor": div,
        "final_div_factor": final_div, "three_phase": three,
    }  # fmt: skip

    def run(make: Callable[..., OneCycleLR], **more: Any) -> tuple[Any, Any]:
        try:
            scheduler = make(optimizer(kind), **arguments, **more)
            seen = course(scheduler, total)
        except ZeroDivisionError as error:  # torch's, where a phase has no steps
            return type(error), None
        return seen, scheduler

    theirs, their = run(OneCycleLR)
    ours, our = run(hdet.OneCycleHDET, **extras)
    assert ours == theirs
    if their is not None:
        assert our.state_dict() == their.state_dict()
        assert {k: v for k, v in vars(our).items() if k not in OWN} == {
            k: v for k, v in vars(their).items() if k not in OWN
        }
        with pytest.raises(ValueError, match=f"Tried to step {total + 1} times"):
            our.step()


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_tensor_rates_stay_the_same_objects(kind: str) -> None:
    def run(make: Callable[..., OneCycleLR]) -> list[list[float]]:
        lr = torch.tensor(0.05)
        made: Optimizer
        if kind == "adamw":
            made = AdamW([nn.Parameter(torch.ones(3))], lr=lr, fused=True)
        else:
            made = SGD([nn.Parameter(torch.ones(3))], lr=lr, momentum=0.9)
        held = made.param_groups[0]["lr"]
        scheduler = make(made, 0.1, total_steps=8)
        seen = []
        for _ in range(8):
            seen.append([float(made.param_groups[0]["lr"])])
            assert made.param_groups[0]["lr"] is held
            assert scheduler.get_last_lr()[0] is not held
            made.step()
            scheduler.step()
        return seen

    assert run(hdet.OneCycleHDET) == run(OneCycleLR)


def test_a_state_makes_the_round_trip_both_ways() -> None:
    def run(first: Callable[..., OneCycleLR], second: Callable[..., OneCycleLR]) -> tuple[list[Any], list[Any]]:
        scheduler = first(optimizer(), 0.3, total_steps=20)
        course(scheduler, 8)
        other_optimizer = optimizer()
        other = second(other_optimizer, 7.0, total_steps=99, anneal_strategy="linear")
        buffer = io.BytesIO()
        torch.save((scheduler.state_dict(), scheduler.optimizer.state_dict()), buffer)
        buffer.seek(0)
        state, optimizer_state = torch.load(buffer, weights_only=True)
        other_optimizer.load_state_dict(optimizer_state)
        other.load_state_dict(state)
        for key, value in vars(scheduler).items():
            if key not in OWN:
                assert vars(other)[key] == value, key
        assert other.get_last_lr() == scheduler.get_last_lr()
        return course(scheduler, 11), course(other, 11)

    for pair in (
        (hdet.OneCycleHDET, hdet.OneCycleHDET),
        (OneCycleLR, hdet.OneCycleHDET),
        (hdet.OneCycleHDET, OneCycleLR),
    ):
        ours, theirs = run(*pair)  # type: ignore[arg-type]
        assert ours == theirs


def test_it_resumes_by_last_epoch() -> None:
    def run(make: Callable[..., OneCycleLR]) -> list[Any]:
        made = optimizer()
        course(make(made, 0.3, total_steps=20), 8)
        return course(make(made, 0.3, total_steps=20, last_epoch=8), 10)

    assert run(hdet.OneCycleHDET) == run(OneCycleLR)


@pytest.mark.parametrize("how", ["chained", "sequential", "epoch", "keyword"])
def test_chained_use_is_torch_s(how: str) -> None:
    def run(make: Callable[..., OneCycleLR]) -> list[Any]:
        made = optimizer()
        if how == "chained":
            first = ConstantLR(made, factor=0.5, total_iters=3)
            scheduler: Any = ChainedScheduler([first, make(made, 0.3, total_steps=20)])
        elif how == "sequential":
            parts = [LinearLR(made, start_factor=0.1, total_iters=4), make(made, 0.3, total_steps=20)]
            scheduler = SequentialLR(made, parts, milestones=[4])
        else:
            scheduler = make(made, 0.3, total_steps=20)
        seen = []
        for step in range(10):
            made.step()
            if how == "epoch":
                scheduler.step(step * 2)
            elif how == "keyword":
                scheduler.step(epoch=step)
            else:
                scheduler.step()
            seen.append([(group["lr"], group["momentum"]) for group in made.param_groups])
        return seen

    assert run(hdet.OneCycleHDET) == run(OneCycleLR)


def test_calls_in_the_wrong_order_warn() -> None:
    scheduler = hdet.OneCycleHDET(optimizer(), 0.3, total_steps=20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler.step(torch.zeros(()))
    assert any("before `optimizer.step()`" in str(warning.message) for warning in caught)

    made = optimizer()
    scheduler = hdet.OneCycleHDET(made, 0.3, total_steps=20)
    made.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler.step(torch.zeros(()))
    assert not caught

    made = optimizer()
    scheduler = hdet.OneCycleHDET(made, 0.3, total_steps=20)
    made.step = lambda: None  # type: ignore[method-assign, assignment]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler.step()
    assert any("has been overridden" in str(warning.message) for warning in caught)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler.get_lr()
    assert any("get_last_lr" in str(warning.message) for warning in caught)


def test_it_is_pickled_and_copied_like_torch_s() -> None:
    scheduler = hdet.OneCycleHDET(optimizer(), 0.3, total_steps=20)
    course(scheduler, 5)
    for again in (pickle.loads(pickle.dumps(scheduler)), copy.deepcopy(scheduler)):
        assert again.state_dict() == scheduler.state_dict()
        assert isinstance(again, hdet.OneCycleHDET)


def test_no_cycle_keeps_it_or_its_optimizer_alive() -> None:
    made = optimizer()
    scheduler = hdet.OneCycleHDET(made, 0.3, total_steps=20)
    made.step()
    scheduler.step(torch.zeros(()))
    gc.disable()
    try:
        watched = weakref.ref(made)
        del scheduler, made
        assert watched() is None
    finally:
        gc.enable()


def test_without_exploration_there_is_no_engine() -> None:
    scheduler = hdet.OneCycleHDET(optimizer(), 0.3, total_steps=20)
    with pytest.raises(StepError, match="give it a spread"):
        scheduler.engine  # noqa: B018
    scheduler.finish()


def test_a_declaration_that_cannot_be_is_refused_even_in_one_process() -> None:
    for options in ({"spread": -0.1}, {"spread": 0.1, "sigma": 0.0}, {"spread": 0.1, "beta": 1.0},
                    {"spread": 0.1, "auto_lr_warmup": -3}):  # fmt: skip
        with pytest.raises(ConfigError):
            hdet.OneCycleHDET(optimizer(), 0.3, total_steps=20, **options)  # type: ignore[arg-type]
    model = nn.Linear(2, 1)
    made = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ConfigError, match="not both"):
        hdet.OneCycleHDET(made, 0.3, total_steps=20, spread=0.1, model=model, replicas=hdet.replicate(model, made, n=2))
    other = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ConfigError, match="same optimizer"):
        hdet.OneCycleHDET(other, 0.3, total_steps=20, spread=0.1, replicas=hdet.replicate(model, made, n=2))


# -- with something to explore --------------------------------------------------------------------

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
        seen = []
        while self.step_count < until:
            seen.append([[float(g["lr"]) for g in made.param_groups] for _, made in self.home.hosts])
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
        return seen

    def weights(self) -> list[Tensor]:
        return [t.clone() for model, _ in self.home.hosts for t in model.state_dict().values()]


def one_cycle(made: Optimizer, home: hdet.replicas.Replicas, **options: Any) -> hdet.OneCycleHDET:
    settings = {
        "spread": 0.2,
        "window": WINDOW,
        "auto_lr_warmup": 8,
        "sigma": 0.05,
        "replicas": home,
        **options,
    }
    return hdet.OneCycleHDET(made, [0.1, 0.05], total_steps=TOTAL, **settings)


def test_replicas_fan_out_from_the_first_step_and_converge_every_window() -> None:
    job = Job(one_cycle)
    plain = OneCycleLR(Job(lambda made, home: None).home.hosts[0][1], [0.1, 0.05], total_steps=TOTAL)
    bases = [[group["lr"] for group in plain.optimizer.param_groups]]
    for _ in range(8):
        plain.step()
        bases.append([group["lr"] for group in plain.optimizer.param_groups])
    rates = np.array(job.train(until=8))  # [step, replica, group]
    ratios = rates / np.array(bases)[:8, None, :]
    np.testing.assert_allclose(np.sort(ratios, axis=1), np.broadcast_to([[0.8], [1.0], [1.2]], (8, 3, 2)), rtol=1e-12)
    # constant within a window, redrawn for each, group by group
    assert (np.ptp(ratios[:4], axis=0) < 1e-12).all()
    assert (np.ptp(ratios[4:8], axis=0) < 1e-12).all()
    # all alike at a window's end, apart within it
    first, *others = [model.state_dict() for model, _ in job.home.hosts]
    assert all(torch.equal(first[key], other[key]) for other in others for key in first)
    job.train(until=9)
    weight, other = (model.state_dict()["0.weight"] for model, _ in job.home.hosts[:2])
    assert not torch.equal(weight, other)


def test_permutations_of_the_groups_are_independent() -> None:
    orders = set()
    for seed in range(20):
        job = Job(lambda made, home, seed=seed: one_cycle(made, home, seed=seed), n=2)
        rates = np.array(job.train(until=1))[0]
        orders.add(tuple((rates[0] > rates[1]).tolist()))
    assert len(orders) == 4


def test_momentum_goes_on_cycling_in_every_replica() -> None:
    job = Job(one_cycle)
    plain = OneCycleLR(optimizer(), 0.1, total_steps=TOTAL)
    for step in range(TOTAL):
        for _, made in job.home.hosts:
            assert [group["momentum"] for group in made.param_groups] == [
                plain.optimizer.param_groups[0]["momentum"]
            ] * 2
        job.train(until=step + 1)
        plain.step()
    job = Job(one_cycle, kind="adamw")
    job.train(until=7)
    assert len({made.param_groups[0]["betas"] for _, made in job.home.hosts}) == 1
    assert job.home.hosts[1][1].param_groups[0]["betas"][0] != 0.95


def test_control_begins_after_the_warm_up_and_holds_the_base_within_a_window() -> None:
    job = Job(one_cycle)
    rates = np.array(job.train(until=TOTAL)).mean(axis=1)  # the levels sum to zero, so this is the base
    history = job.scheduler.engine.history.windows
    moves = [[record.moves[name] for name in record.moves] for record in history]
    assert moves[0] == [0.0, 0.0]
    assert all(move != 0.0 for move in moves[1])  # the window that ends at step 8
    for start in range(8, 20, WINDOW):
        np.testing.assert_allclose(
            rates[start : start + WINDOW], np.broadcast_to(rates[start], (WINDOW, 2)), rtol=1e-12
        )
    assert rates[20, 0] < rates[8, 0]
    assert job.scheduler.engine.finished


def test_the_history_holds_what_was_in_force() -> None:
    job = Job(one_cycle)
    rates = np.array(job.train(until=TOTAL))
    for record in job.scheduler.engine.history:
        np.testing.assert_allclose(np.array(list(record.values.values())).T, rates[record.stop - 1], rtol=1e-12)


def test_without_a_loss_it_fans_out_and_converges_and_does_not_control() -> None:
    job = Job(one_cycle)
    job.train(until=TOTAL, told=False)
    history = job.scheduler.engine.history.windows
    assert all(record.merged for record in history)
    assert not any(move for record in history for move in record.moves.values())
    assert all(loss is None for record in history for loss in record.losses)
    assert not any(record.faults for record in history)
    assert job.scheduler.bases == pytest.approx(
        {f"learning_rate[{g}]": rate for g, rate in enumerate(OneCycleLR_end([0.1, 0.05]))}
    )


def OneCycleLR_end(max_lr: list[float]) -> list[float]:  # noqa: N802
    plain = OneCycleLR(optimizer(), max_lr, total_steps=TOTAL)
    for _ in range(TOTAL):
        plain.step()
    return [group["lr"] for group in plain.optimizer.param_groups]


def test_without_auto_lr_the_base_is_the_cycle() -> None:
    job = Job(lambda made, home: one_cycle(made, home, auto_lr=False))
    job.train(until=TOTAL)
    assert list(job.scheduler.bases.values()) == pytest.approx(OneCycleLR_end([0.1, 0.05]))


def test_after_the_last_step_everything_is_merged_and_a_step_more_is_an_error() -> None:
    job = Job(one_cycle)
    job.train(until=TOTAL)
    first, *others = [model.state_dict() for model, _ in job.home.hosts]
    assert all(torch.equal(first[key], other[key]) for other in others for key in first)
    with pytest.raises(ValueError, match="Tried to step 24 times"):
        job.scheduler.step([torch.zeros(())] * 3)


def test_finish_merges_before_the_end() -> None:
    job = Job(one_cycle)
    job.train(until=10)
    job.scheduler.finish()
    first, *others = [model.state_dict() for model, _ in job.home.hosts]
    assert all(torch.equal(first[key], other[key]) for other in others for key in first)
    with pytest.raises(StepError, match="the run is over"):
        job.scheduler.step([torch.zeros(())] * 3)


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


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_resume_at_any_step_is_the_same_run_bit_for_bit(wrap: str, kind: str) -> None:
    whole = Job(WRAPS[wrap], kind=kind)
    states, rates = [], []
    for step in range(TOTAL):
        buffer = io.BytesIO()
        torch.save(whole.scheduler.state_dict(), buffer)
        states.append(buffer.getvalue())
        rates += whole.train(until=step + 1)
    for step in range(0, TOTAL, 3 if kind == "sgd" else 7):
        resumed = Job(WRAPS[wrap], kind=kind)
        resumed.train(until=min(step, 5))  # whatever it did before must not matter
        resumed.scheduler.load_state_dict(torch.load(io.BytesIO(states[step]), weights_only=True))
        resumed.step_count = step
        assert resumed.scheduler.last_epoch == step
        assert resumed.train(until=TOTAL) == rates[step:], step
        for own, other in zip(resumed.weights(), whole.weights(), strict=True):
            assert torch.equal(own, other)
        assert resumed.scheduler.bases == whole.scheduler.bases


@pytest.mark.parametrize("n", [2, 4])
def test_a_resume_with_another_number_of_replicas_goes_on_from_the_converged_point(n: int) -> None:
    job = Job(one_cycle)
    job.train(until=12)
    bases, converged = job.scheduler.bases, job.model.state_dict()["0.weight"].clone()
    job.train(until=14)
    other = Job(one_cycle, n=n)
    other.scheduler.load_state_dict(copy.deepcopy(job.scheduler.state_dict()))
    assert other.scheduler.last_epoch == 12
    assert other.scheduler.bases == bases
    for model, _ in other.home.hosts:
        assert torch.equal(model.state_dict()["0.weight"], converged)
    other.step_count = 12
    other.train(until=TOTAL)
    assert other.scheduler.engine.finished


def test_a_resume_with_one_replica_keeps_what_was_learned() -> None:
    job = Job(one_cycle)
    job.train(until=12)
    bases = job.scheduler.bases
    job.train(until=13)
    alone = Job(one_cycle, n=1)
    alone.train(until=2)
    alone.scheduler.load_state_dict(copy.deepcopy(job.scheduler.state_dict()))
    assert alone.scheduler.last_epoch == 12
    assert alone.scheduler.bases == bases
    alone.step_count = 12
    rates = alone.train(until=TOTAL)
    assert rates[0] == rates[-1] == [list(bases.values())]  # one replica learns nothing more


def test_a_plain_state_starts_exploring_at_its_step() -> None:
    made = optimizer()
    plain = OneCycleLR(made, 0.1, total_steps=TOTAL)
    for _ in range(10):
        plain.step()
    job = Job(one_cycle)
    job.home.hosts[0][1].load_state_dict({**job.home.hosts[0][1].state_dict()})
    job.train(until=2)
    job.scheduler.load_state_dict(plain.state_dict())
    job.step_count = 10
    job.train(until=TOTAL)
    assert job.scheduler.engine.finished
    assert job.scheduler.engine.total_steps == TOTAL - 10


def test_a_state_of_exploration_that_began_late_fits_a_fresh_scheduler() -> None:
    plain = OneCycleLR(optimizer(), 0.1, total_steps=TOTAL)
    for _ in range(10):
        plain.step()
    job = Job(one_cycle)
    job.scheduler.load_state_dict(plain.state_dict())
    job.step_count = 10
    job.train(until=13)
    other = Job(one_cycle)
    other.scheduler.load_state_dict(copy.deepcopy(job.scheduler.state_dict()))
    other.step_count = 13
    assert other.train(until=TOTAL) == job.train(until=TOTAL)
    assert all(torch.equal(own, same) for own, same in zip(other.weights(), job.weights(), strict=True))


def test_an_exploring_state_needs_an_exploring_scheduler() -> None:
    job = Job(one_cycle)
    with pytest.raises(CheckpointError, match="spread=0"):
        hdet.OneCycleHDET(optimizer(), 0.1, total_steps=TOTAL).load_state_dict(job.scheduler.state_dict())


def test_exploring_it_cannot_jump_or_be_pickled() -> None:
    job = Job(one_cycle)
    with pytest.raises(StepError, match="explore the whole chain"):
        job.scheduler.step(3)
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(job.scheduler)


def test_tensor_rates_are_explored_in_place() -> None:
    model = nn.Linear(2, 1)
    made = AdamW(model.parameters(), lr=torch.tensor(0.1), fused=True)
    held = made.param_groups[0]["lr"]
    scheduler = hdet.OneCycleHDET(
        made, 0.5, total_steps=20, spread=0.1, window=2, replicas=hdet.replicate(model, made, n=2)
    )
    plain = OneCycleLR(optimizer(), 0.5, total_steps=20)
    for _ in range(5):
        assert made.param_groups[0]["lr"] is held
        base = plain.optimizer.param_groups[0]["lr"]
        values = sorted(float(each.param_groups[0]["lr"]) for each in scheduler.engine.optimizers)
        assert values == pytest.approx([0.9 * base, 1.1 * base], rel=1e-6)
        scheduler.step([torch.zeros(())] * 2)
        plain.step()


# -- explore --------------------------------------------------------------------------------------

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
    hold = hdet.LearningRate(space=hdet.Relative(), spread=hdet.Symmetric(0.3), controller=hdet.Hold())
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
    hold = hdet.LearningRate(space=hdet.Relative(), spread=hdet.Symmetric(0.3), controller=hdet.Hold())
    model = nn.Linear(2, 1)
    made = SGD(model.parameters(), lr=0.1)
    scheduler = hdet.explore(
        ReduceLROnPlateau(made, factor=0.5, patience=0),
        knob=hold,
        window=2,
        replicas=hdet.replicate(model, made, n=2),
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
    with pytest.raises(StepError, match="no engine"):
        scheduler.engine  # noqa: B018


def test_explore_says_what_it_cannot_take() -> None:
    with pytest.raises(ConfigError, match="takes a torch LR scheduler, got int"):
        hdet.explore(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="leave them out"):
        hdet.explore(CosineAnnealingLR(optimizer(), 10), knob=hdet.LearningRate(groups=0))
    with pytest.raises(CheckpointError, match="this process is alone"):
        hdet.explore(CosineAnnealingLR(optimizer(), 10)).load_state_dict({"scheduler": {}, "hdet": {}})
