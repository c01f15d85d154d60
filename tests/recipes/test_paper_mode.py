"""Paper mode: small numbers worked by hand, the errata, and the whole cycle against a plain transcription."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import hdet
from hdet.controllers import Context, Estimate, NoState, Paper
from hdet.controllers.estimators import Comparison
from hdet.designs import Permutation
from hdet.errors import ConfigError
from hdet.estimators import Softmax
from hdet.hparams.bound_knob import BoundKnob
from hdet.schedules import HeldOneCycle, OneCycle, Schedule
from hdet.spaces import Relative
from hdet.spec import Spec
from hdet.spreads import Symmetric

E = math.e


# -- equations, by hand ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "multipliers"),
    [
        (2, [8 / 9, 10 / 9]),  # d = max(1/2, 1/2)
        (3, [8 / 9, 1, 10 / 9]),
        (4, [8 / 9, 26 / 27, 28 / 27, 10 / 9]),  # d = 3/2, steps of a 2/3
        (8, [1 + (2 * r - 7) / 63 for r in range(8)]),  # d = 7/2
    ],
)
def test_equation_1_the_fan_out(n: int, multipliers: list[float]) -> None:
    space, levels = Relative(), Symmetric(1 / 9).levels(n)
    rates = [space.apply(9.0, level) for level in levels]
    assert rates == pytest.approx([9 * rho for rho in multipliers], rel=1e-15)


def softmax(losses: list[float], levels: list[float], sigma: float) -> float:
    comparison = Comparison(np.array(levels)[:, None], np.array(losses), np.zeros(1), np.ones(len(levels)))
    (estimate,), _ = Softmax(sigma).estimate(NoState(), comparison)
    return estimate.slope


def test_the_displacement_of_two_replicas() -> None:
    # L = (1.1, 1.0), sigma = .1: s = (-1/2, 1/2), w = (1, e) / (1 + e), Delta = a (e - 1) / (e + 1) = a
    # tanh(1/2)
    assert -softmax([1.1, 1.0], [-1 / 9, 1 / 9], 0.1) == pytest.approx((E - 1) / (E + 1) / 9, rel=1e-12)


def test_the_displacement_of_three_replicas() -> None:
    # L = (1.2, 1.1, 1.0): w = (1, e, e^2) / (1 + e + e^2)
    expected = (E**2 - 1) / (1 + E + E**2) * 0.3
    assert -softmax([1.2, 1.1, 1.0], [-0.3, 0.0, 0.3], 0.1) == pytest.approx(expected, rel=1e-12)


def test_the_displacement_is_the_slope_up_to_a_factor() -> None:
    """Erratum 8: to first order Delta is -(a^2 c_N / sigma) dL/dz, c_N = (N + 1) / (3 (N - 1))."""
    a, sigma, slope = 0.1, 0.5, 1e-4
    for n in (2, 3, 4, 8):
        levels = Symmetric(a).levels(n)
        found = softmax((3 + slope * levels).tolist(), levels.tolist(), sigma)
        assert found == pytest.approx(a**2 * (n + 1) / (3 * (n - 1)) / sigma * slope, rel=1e-4)


def test_two_steps_of_control() -> None:
    """base 1, floor 1/4, K = 2: gamma = 1/2; beta = 1/2, lambda = 1/2."""
    paper, relative = Paper(0.25, beta=0.5, rate=0.5), Relative()
    # Delta = .2 base = .2, v = .1, base = .5 + .05
    move, state = paper.step(paper.start(), Estimate(slope=-0.2), Context(windows_left=2))
    assert relative.apply(1.0, move) == pytest.approx(0.55)
    assert (state.velocity, state.decay) == pytest.approx((0.1, 0.5))
    # Delta = -.1 base = -.055, v = .05 - .0275 = .0225, base = .275 + .01125
    second, state = paper.step(state, Estimate(slope=0.1), Context(windows_left=1, shift=move))
    assert relative.apply(1.0, move + second) == pytest.approx(0.28625)


def test_the_decay_as_printed_grows_the_rate_400_fold() -> None:
    """Erratum 1, and the corrected decay: from the base at the start of control to the floor in K windows."""
    div, final_div, k = 25.0, 1e4, 70
    printed = 1 - math.exp(-math.log(div / final_div) / k)
    assert printed < 0
    assert (1 - printed) ** k == pytest.approx(400.0)
    paper = Paper(1.0 / (div * final_div))
    _, state = paper.step(paper.start(), Estimate(slope=1e-300), Context(windows_left=k))
    assert (1 - state.decay) ** k == pytest.approx(1 / (div * final_div))


def test_the_velocity_cannot_take_the_rate_below_the_floor() -> None:
    """The printed recursion can: the velocity remembers displacements of a base that has decayed since."""
    paper, relative = Paper(1e-4, beta=0.9, rate=0.5), Relative()
    state, shift, printed, velocity = paper.start(), 0.0, 1.0, 0.0
    bases, naive = [], []
    for left in range(4, 0, -1):
        move, state = paper.step(state, Estimate(slope=0.5), Context(windows_left=left, shift=shift))
        shift += move
        bases.append(relative.apply(1.0, shift))
        velocity = 0.9 * velocity - 0.1 * 0.5 * printed
        printed = printed * (1 - state.decay) + 0.5 * velocity
        naive.append(printed)
    assert min(naive) < 0
    assert min(bases) == pytest.approx(1e-4)


def test_the_noise_of_the_warm_start() -> None:
    """|eps_r| = nu |theta_0| up to sampling: eps ~ N(0, nu^2 |theta_0|^2 / d) in d dimensions."""
    model = nn.Linear(200, 200, bias=False)
    start = model.weight.detach().clone()
    hdet.perturb(model, 0.01, replica=3)
    assert float((model.weight.detach() - start).norm() / start.norm()) == pytest.approx(0.01, rel=0.02)


def test_the_cycle_is_held_where_control_begins() -> None:
    cycle = OneCycle(0.3, total_steps=50)
    held = HeldOneCycle(0.3, total_steps=50, held_from=20)
    assert [held(t) for t in range(60)] == [cycle(min(t, 20)) for t in range(60)]
    assert isinstance(held, Spec)
    assert Schedule.from_dict(held.to_dict()) == held


# -- the whole cycle ------------------------------------------------------------------------------

Array = NDArray[np.float64]
FEATURES, BATCH, MOMENTUM = 5, 6, 0.9
STEPS, WINDOW, WARMUP = 57, 6, 15
MAX_LR, DIV, FINAL_DIV = 0.05, 25.0, 1e4
SPREAD, SIGMA, BETA, RATE = 0.3, 0.05, 0.9, 0.5


def data(step: int, replica: int) -> tuple[Array, Array]:
    rng = np.random.Generator(np.random.Philox(key=[step, replica]))
    x = rng.standard_normal((BATCH, FEATURES))
    return x, x @ np.arange(1.0, FEATURES + 1) + 0.5 + 0.3 * rng.standard_normal(BATCH)


def one_cycle(t: int) -> float:
    """OneCycleLR by its description: cosine up over 30 % of the steps, cosine down to the floor."""
    low, top = MAX_LR / DIV, 0.3 * STEPS - 1
    if t <= top:
        return MAX_LR + (low - MAX_LR) / 2 * (1 + math.cos(math.pi * t / top))
    floor = low / FINAL_DIV
    return floor + (MAX_LR - floor) / 2 * (1 + math.cos(math.pi * (t - top) / (STEPS - 1 - top)))


def algorithm_1(
    n: int, gradients: str, start: tuple[Array, Array], assign: Callable[[int], NDArray[np.int64]], auto_lr: bool = True
) -> dict[str, Any]:
    """Algorithm 1 for a linear model with two parameter groups (weights, bias), from the equations.

    `assign(window)` gives the [N, 2] multiplier indices. Corrections, by their number in docs/paper.md:
    1 gamma from the base's own ratio to the floor; 2 the fan-out holds from the first step; 3 averaging does
    not depend on auto-LR; 4 no average before the first window; 5 the loss accumulator is reset every window,
    and the schedule does not overwrite the controlled base; 7 a converge at the end. And the base is kept at
    or above the floor.
    """
    half = max((n - 1) / 2, 0.5)
    rho = np.array([1 + SPREAD * (r - (n - 1) / 2) / half for r in range(n)])
    theta = [[start[0].copy() for _ in range(n)], [start[1].copy() for _ in range(n)]]
    buffers: list[list[Any]] = [[None] * n, [None] * n]
    controlled = False
    base, velocity = np.zeros(2), np.zeros(2)
    gamma = 0.0
    accumulated, counted, window = np.zeros(n), 0, 0
    choice = assign(window)
    rates, history = [], []
    for t in range(STEPS):
        centre = base if controlled else np.full(2, one_cycle(t))
        lr = centre[None, :] * rho[choice]  # [N, 2]
        rates.append(lr)
        own: list[list[Array]] = [[], []]
        for r in range(n):
            x, y = data(t, r)
            error = x @ theta[0][r] + theta[1][r] - y
            accumulated[r] += (error**2).mean()
            own[0].append(2 * x.T @ error / BATCH)
            own[1].append(np.array([2 * error.mean()]))
        counted += 1
        for k in range(2):
            for r in range(n):
                g = sum(own[k]) / n if gradients == "shared" else own[k][r]
                buffers[k][r] = g if buffers[k][r] is None else MOMENTUM * buffers[k][r] + g
                theta[k][r] = theta[k][r] - lr[r, k] * buffers[k][r]
        if (t + 1) % WINDOW and t + 1 < STEPS:
            continue
        for k in range(2):
            mean = sum(theta[k]) / n
            theta[k] = [mean.copy() for _ in range(n)]
        losses = accumulated / counted
        if auto_lr and t + 1 >= WARMUP:
            if not controlled:
                controlled, base = True, centre.copy()
                remaining = max(1, math.ceil((STEPS - t - 1) / WINDOW))
                gamma = 1 - (base[0] / (MAX_LR / DIV / FINAL_DIV)) ** (-1 / remaining)
                lr = base[None, :] * rho[choice]
            s = (losses.mean() - losses) / SIGMA
            w = np.exp(s) / np.exp(s).sum()
            delta = (w[:, None] * lr).sum(0) - lr.mean(0)
            velocity = BETA * velocity + (1 - BETA) * delta
            base = np.maximum(base * (1 - gamma) + RATE * velocity, MAX_LR / DIV / FINAL_DIV)
        history.append((losses, base.copy()))
        accumulated, counted, window = np.zeros(n), 0, window + 1
        choice = assign(window)
    return {"theta": [theta[0][0], theta[1][0]], "rates": np.array(rates), "history": history}


class Line(nn.Module):
    def __init__(self, weight: Array, bias: Array) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))
        self.bias = nn.Parameter(torch.tensor(bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


def replicas(n: int, start: tuple[Array, Array]) -> hdet.replicas.Copies:
    model = Line(*start)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    return hdet.replicate(model, torch.optim.SGD(groups, lr=1.0, momentum=MOMENTUM), n=n)


def train(home: hdet.replicas.Copies, step: Callable[[list[torch.Tensor]], Any], gradients: str) -> Array:
    """The user's loop; returns the rates in force, [steps, N, 2]."""
    rates: list[list[float]] = []
    for _, made in home.hosts:
        made.register_step_pre_hook(lambda made, *_: rates.append([group["lr"] for group in made.param_groups]))
    for t in range(STEPS):
        losses = []
        for replica in home.local:
            x, y = (torch.tensor(array) for array in data(t, replica.index))
            loss = (replica.model(x) - y).square().mean()
            loss.backward()
            losses.append(loss.detach())
        if gradients == "shared":
            home.share_gradients()
        for _, made in home.hosts:
            made.step()
            made.zero_grad()
        step(losses)
    return np.array(rates).reshape(STEPS, len(home.hosts), 2)


def reassigned(n: int, seed: int) -> Callable[[int], NDArray[np.int64]]:
    """Which multiplier each replica gets, by the design's own random source."""
    indices = np.arange(n, dtype=np.float64)

    def assign(window: int) -> NDArray[np.int64]:
        names = ["learning_rate[0]", "learning_rate[1]"]
        drawn = Permutation().assign(
            [indices, indices], seed=seed, window=window, names=names, two_level=[False, False]
        )
        return drawn.astype(np.int64)

    return assign


def result(home: hdet.replicas.Copies, name: str) -> Any:
    """A parameter of the first replica, which holds the merged model at the end."""
    return home.hosts[0][0].get_parameter(name).detach().numpy()


START = (np.array([0.3, -0.2, 0.1, 0.0, 0.5]), np.array([0.2]))


@pytest.mark.parametrize("gradients", ["shared", "local"])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_the_engine_is_algorithm_1(n: int, gradients: Any) -> None:
    expected = algorithm_1(n, gradients, START, reassigned(n, seed=5))
    home = replicas(n, START)
    engine = hdet.paper_engine(
        home, max_lr=MAX_LR, total_steps=STEPS, window=WINDOW, spread=SPREAD, warmup_steps=WARMUP,
        sigma=SIGMA, beta=BETA, rate=RATE, div_factor=DIV, final_div_factor=FINAL_DIV,
        gradients=gradients, seed=5,
    )  # fmt: skip
    rates = train(home, engine.step, gradients)
    # losses are summed in float32
    np.testing.assert_allclose(rates, expected["rates"], rtol=2e-5)
    for record, (losses, _) in zip(engine.history, expected["history"], strict=True):
        np.testing.assert_allclose(np.array(record.losses, dtype=float), losses, rtol=2e-5)
    np.testing.assert_allclose(result(home, "weight"), expected["theta"][0], rtol=1e-5)
    np.testing.assert_allclose(result(home, "bias"), expected["theta"][1], rtol=1e-5)
    # and the comparison could have failed: control moved the bases, differently from group to group
    controlled = np.array([base for _, base in expected["history"][2:-1]])
    assert np.ptp(np.log(controlled[:, 0] / controlled[:, 1])) > 1e-3


@pytest.mark.parametrize("n", [2, 4])
def test_the_drop_in_is_algorithm_1(n: int) -> None:
    expected = algorithm_1(n, "shared", START, reassigned(n, seed=5))
    home = replicas(n, START)
    scheduler = hdet.OneCycleHDET(
        home.hosts[0][1], MAX_LR, total_steps=STEPS, cycle_momentum=False, spread=SPREAD, window=WINDOW,
        auto_lr_warmup=WARMUP, sigma=SIGMA, beta=BETA, rate=RATE, seed=5, replicas=home,
    )  # fmt: skip
    rates = train(home, scheduler.step, "shared")
    np.testing.assert_allclose(rates, expected["rates"], rtol=2e-5)
    np.testing.assert_allclose(result(home, "weight"), expected["theta"][0], rtol=1e-5)


def test_without_control_it_fans_out_and_averages_all_the_same() -> None:
    """Erratum 3: the released code returns before averaging."""
    expected = algorithm_1(3, "shared", START, reassigned(3, seed=5), auto_lr=False)
    home = replicas(3, START)
    engine = hdet.paper_engine(
        home, max_lr=MAX_LR, total_steps=STEPS, window=WINDOW, spread=SPREAD, auto_lr=False, seed=5
    )
    np.testing.assert_allclose(train(home, engine.step, "shared"), expected["rates"], rtol=1e-12)
    assert all(record.merged for record in engine.history)
    np.testing.assert_allclose(result(home, "weight"), expected["theta"][0], rtol=1e-9)


def deviations(groups: int) -> NDArray[np.float64]:
    """Singular values of eight AdamW replicas' deviations from their mean, over the largest."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    parameters = list(model.parameters())
    split = [{"params": parameters[group::groups]} for group in range(groups)]
    home = hdet.replicate(model, torch.optim.AdamW(split, lr=1.0), n=8)
    engine = hdet.paper_engine(home, max_lr=1e-3, total_steps=100, window=50, auto_lr=False)
    for t in range(20):
        for replica in home.local:
            generator = torch.Generator().manual_seed(100 * t + replica.index)
            x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
            (replica.model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        engine.share_gradients()
        for _, made in home.hosts:
            made.step()
            made.zero_grad()
        engine.step()
    weights = torch.stack([torch.cat([p.detach().flatten() for p in model.parameters()]) for model, _ in home.hosts])
    singular: NDArray[np.float64] = torch.linalg.svdvals(weights - weights.mean(0)).numpy()
    assert singular[0] > 1e-4
    return singular / singular[0]


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_under_shared_gradients_and_adamw_deviations_have_a_rank_for_each_group(groups: int) -> None:
    """Erratum 10: replicas differ by step size alone, one number a group. (Weight decay adds what is left.)"""
    singular = deviations(groups)
    assert singular[groups - 1] > 1e-2
    assert singular[groups] < 1e-6


def test_a_knob_for_each_group_and_a_default_warm_up() -> None:
    engine = hdet.paper_engine(replicas(4, START), max_lr=0.1, total_steps=1000, window=70)
    assert [knob.name for knob in engine.knobs] == ["learning_rate[0]", "learning_rate[1]"]
    controller = engine.knobs[0].spec.controller
    assert isinstance(controller, Paper)
    assert controller.warmup_steps == 300
    schedule = engine.knobs[0].schedule
    assert isinstance(schedule, HeldOneCycle)
    assert schedule.held_from == 350  # the first window end at or after the warm-up
    assert isinstance(engine.knobs[0], BoundKnob)


def test_what_cannot_be_is_refused() -> None:
    for options in ({"warmup_steps": -1}, {"sigma": 0.0}, {"spread": -1.0}, {"window": 0}, {"beta": 1.0}):
        with pytest.raises(ConfigError):
            hdet.paper_engine(replicas(4, START), max_lr=0.1, total_steps=100, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": "3"}, "window must be of type int, got '3'"),  # three of which are no window of 333 steps
        ({"window": True}, "window must be of type int, got True"),
        ({"warmup_steps": "3"}, "warmup_steps must be of type int, got '3'"),
        ({"total_steps": math.nan}, "one_cycle: total_steps"),
        ({"pct_start": None}, "one_cycle: pct_start"),
    ],
)
def test_what_is_no_number_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hdet.paper_engine(replicas(4, START), **{"max_lr": 0.1, "total_steps": 100, **options})
