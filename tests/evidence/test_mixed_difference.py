"""Mixed differences against gradients, against training a step again, and against knobs that do nothing.

Under loss a (c . w) the gradient a c is the same wherever w is, so that one step of SGD at rate r does
-r (g_p . c) a du to a probe with gradient g_p: slopes below are exact up to rounding.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import explicit_loop
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hdet
from hdet import Engine, Objective, Probe
from hdet.controllers import Gated, Hold
from hdet.errors import ConfigError, IdentifiabilityError, StepError
from hdet.evidence import MixedDifference
from hdet.evidence.mixed_difference import MixedDifferenceCollector
from hdet.evidence.parts.probe_gradient import aim
from hdet.hparams.binding import Attribute
from hdet.hparams.forward import ModuleKnob
from hdet.replicas import gradients, tensors
from hdet.replicas.random_numbers import seeded
from hdet.spaces import Arcsine
from hdet.spreads import TwoLevel

RATE, WIDTH, SCALE = 0.1, 0.2, 1.5
SLOPE = torch.tensor([1.0, -2.0, 0.5])
AIM = torch.tensor([2.0, 1.0, 3.0])


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([3.0, 1.0, -2.0]))
        self.a = SCALE
        self.late = 0.0


class Quiet(ModuleKnob):
    """One of `Vector`'s numbers, said to act in training alone."""

    kind = "quiet_in_mixed_tests"
    attribute: str = "a"

    def cells(self, model: nn.Module, pattern: str) -> Any:
        return {self.attribute: Attribute(model, self.attribute)}


def quiet(attribute: str = "a", **options: Any) -> Quiet:
    given = {"bounds": (0.01, 100.0), "spread": TwoLevel(WIDTH), "controller": Hold(), **options}
    return Quiet(attribute=attribute, evidence=given.pop("evidence", MixedDifference()), **given)


def on_bound(evidence: MixedDifference | None = None) -> Quiet:
    return quiet(
        "late", space=Arcsine(), bounds=(0.0, 0.9), spread=TwoLevel(0.15), evidence=evidence or MixedDifference()
    )


def scaled(model: Any, factor: float) -> Tensor:
    loss: Tensor = factor * model.a * (SLOPE @ model.w)
    return loss


def read_out(model: Any, batch: float) -> Tensor:
    loss: Tensor = batch * (AIM @ model.w)
    return loss


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def make(
    knobs: list[hdet.Knob],
    *,
    replicas: Callable[..., hdet.replicas.Replicas] = hdet.micro_batches,
    n: int = 1,
    window: int = 8,
    windows: int = 1,
    model: Callable[[], nn.Module] = Vector,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    loss: Callable[[Any, Any], Tensor] = scaled,
    batches: Any = (0.5, 1.5),
    probe: Callable[[Any, Any], Tensor] = read_out,
    held_out: Any = (1.0, 1.0),
    **options: Any,
) -> Engine:
    made = model()
    return Engine(
        replicas(made, optimizer(made), n=n),
        knobs,
        window=window,
        signal=Probe(probe, held_out),
        objective=Objective(loss, batches),
        total_steps=window * windows,
        **options,
    )


def train(
    engine: Engine,
    *,
    loss: Callable[[Any, Any], Tensor] = scaled,
    batch: Callable[[int, int], Any] = lambda step, index: 1.0,
    report: Callable[[int, Tensor], Tensor] = lambda step, own: own,
) -> list[hdet.history.WindowRecord]:
    return explicit_loop.train(engine, loss=lambda model, step, index: loss(model, batch(step, index)), report=report)


def slope_of(engine: Engine, knob: str = "quiet_in_mixed_tests", **options: Any) -> float:
    slope: float = train(engine, **options)[-1].estimates[knob]["slope"]
    return slope


SECANT = math.sinh(WIDTH) / WIDTH
ONE_STEP = -RATE * float(AIM @ SLOPE) * SCALE * SECANT  # d probe / d log a after one step


# -- it is the contrast of gradients --------------------------------------------------------------

CENTRES = torch.randn(10, 20, generator=torch.Generator().manual_seed(0))


def examples(seed: int, count: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    return CENTRES[labels] + 2 * torch.randn(count, 20, generator=generator), labels


def cross_entropy(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def classifier(activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(20, 64), activation(), hdet.nn.Dropout(0.3), nn.Linear(64, 32), activation(), nn.Linear(32, 10)
        )


def with_dropout(
    batches: int = 16,
    activation: Callable[[], nn.Module] = nn.Tanh,
    evidence: MixedDifference | None = None,
    **options: Any,
) -> Engine:
    given = {"window": 60, "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01), **options}
    return make(
        [hdet.Dropout(evidence=evidence or MixedDifference(), controller=Hold())],
        model=lambda: classifier(activation),
        loss=cross_entropy,
        batches=[examples(100 + j) for j in range(batches)],
        probe=cross_entropy,
        held_out=[examples(50 + j) for j in range(8)],
        **given,
    )


def by_gradients(engine: Engine) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[J] -<v, g(u + d) - g(u - d)> / (2 d) by autograd, with the random numbers of the window's measurement."""
    (collector,) = engine.cycle.collectors
    assert isinstance(collector, MixedDifferenceCollector)
    scene, levels, window = collector.scene, collector.levels, engine.cycle.window
    model = scene.replicas.hosts[0][0]
    found = aim(scene, window.index)
    assert found is not None
    assert scene.objective is not None
    slopes = []
    with scene.at_base():
        for j, batch in enumerate(scene.objective.draw(window.index)):
            own = []
            for sign in (1.0, -1.0):
                levels.write(window.stop - 1, 0, sign * levels.half[0])
                with seeded([], f"{scene.seed}:{window.index}:{engine.knobs[0].name}:{j}"):
                    own.append(torch.autograd.grad(scene.objective.loss(model, batch), tensors.trained(model)))
            steps = map(found.step, range(len(found.sums)))
            dots = [((up - down) * v).sum().double() for up, down, v in zip(*own, steps, strict=True)]
            slopes.append(-float(torch.stack(dots).sum()) / (2 * levels.half[0]))
    return np.array(slopes)


def trained_alike(engine: Engine, data: Callable[[int], Any] = lambda step: examples(1000 + step)) -> dict[str, Any]:
    """The last window's estimate of a run in which all replicas see the same batch and random numbers."""

    def batch(step: int, index: int) -> Any:
        torch.manual_seed(step)
        return data(step)

    with torch.random.fork_rng(devices=[]):
        return train(engine, loss=cross_entropy, batch=batch)[-1].estimates["dropout"]


@pytest.mark.parametrize("activation", [nn.Tanh, nn.GELU])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    ],
    ids=["adamw", "momentum"],
)
def test_batch_by_batch_it_is_the_gradients_own_contrast(
    monkeypatch: pytest.MonkeyPatch,
    activation: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    engine = with_dropout(activation=activation, optimizer=optimizer)
    held: dict[str, Any] = {}
    measured = MixedDifferenceCollector._losses

    def spied(self: MixedDifferenceCollector, heard: Any, step: Any, harvest: Any) -> Any:
        held["losses"], held["expected"] = measured(self, heard, step, harvest)[0], by_gradients(engine)
        found = aim(self.scene, 0)
        assert found is not None
        held["distance"] = float(step[0].norm() / found.step(0).norm())
        return held["losses"][None]

    monkeypatch.setattr(MixedDifferenceCollector, "_losses", spied)
    estimate = trained_alike(engine)
    (up, down), half = np.moveaxis(held["losses"], 0, -1), engine.cycle.collectors[0].levels.half[0]  # type: ignore[attr-defined]
    mixed = -((up[0] - up[1]) - (down[0] - down[1])) / (4 * held["distance"] * half)
    expected = held["expected"]
    assert np.corrcoef(mixed, expected)[0, 1] > 0.9999
    assert 0.998 < (mixed @ expected) / (expected @ expected) < 1.001
    assert estimate["slope"] == pytest.approx(expected.mean(), abs=2e-3 * np.abs(expected).mean())
    assert estimate["stderr"] == pytest.approx(expected.std(ddof=1) / 4, rel=2e-3)


@pytest.mark.parametrize("change", [0.001, 0.003, 0.03])
def test_how_far_it_looks_does_not_matter(change: float) -> None:
    reference = trained_alike(with_dropout())
    ours = trained_alike(with_dropout(evidence=MixedDifference(change=change)))
    assert ours["slope"] != reference["slope"]
    assert ours["slope"] == pytest.approx(reference["slope"], abs=0.01 * reference["stderr"])


@pytest.mark.parametrize(("reach", "bound"), [(1.0, False), (1e-4, True)])
def test_it_looks_as_far_as_the_probes_change_and_its_reach_allow(reach: float, bound: bool) -> None:
    """To either side along SGD's step, which is the probe's gradient here."""
    seen: list[Tensor] = []

    def watched(model: Any, factor: float) -> Tensor:
        seen.append(model.w.detach().clone())
        return scaled(model, factor)

    engine = make([quiet(evidence=MixedDifference(change=0.02, reach=reach))], loss=watched)
    train(engine)
    last = engine.replicas[0].model.w.detach()
    ends = sorted({float(AIM @ (at - last) / AIM.norm()) for at in seen})
    far = reach * float(last.norm()) if bound else 0.02 * abs(float(AIM @ last)) / float(AIM.norm())
    assert ends == pytest.approx([-far, far], rel=1e-2)


def test_weights_that_are_all_zero_set_no_bound_to_how_far_it_looks() -> None:
    def begun() -> nn.Module:
        model = Vector()
        model.w.data.copy_(SCALE * SLOPE)  # which eight steps lead to 0
        return model

    engine = make(
        [quiet()],
        model=begun,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.125),  # whose steps are exact
        probe=lambda model, batch: 1.0 + read_out(model, batch),
    )
    slope = slope_of(engine)
    assert not engine.replicas[0].model.w.any()
    assert slope == pytest.approx(ONE_STEP * 0.125 / RATE, rel=1e-3)


def test_where_replicas_come_apart_it_is_measured_at_their_mean() -> None:
    """And by the base of the rate, in a bowl, whose gradient is the weights: the mean, once the window has ended."""
    rate = hdet.LearningRate(evidence=hdet.evidence.Divergent(), spread=TwoLevel(0.5), controller=Hold())

    def bowl(model: Any, factor: float) -> Tensor:
        loss: Tensor = factor * model.a * 0.5 * model.w.square().sum()
        return loss

    engine = make([rate, quiet()], replicas=hdet.replicate, n=2, loss=bowl)
    slope = slope_of(engine, loss=bowl)
    mean = engine.replicas[0].model.w.detach()
    assert slope == pytest.approx(-RATE * float(AIM @ mean) * SCALE * SECANT, rel=1e-3)


def test_what_windows_have_told_of_the_two_losses_is_taken_up() -> None:
    first, second = (make([on_bound(MixedDifference(bound_from=0.0))], loss=leaky, windows=4) for _ in range(2))
    explicit_loop.train(first, 12, loss=lambda model, step, index: leaky(model, 1.0))
    own, fresh = (engine.cycle.collectors[0].state_dict() for engine in (first, second))
    second.load_state_dict(first.state_dict())
    assert second.cycle.collectors[0].state_dict() == own != fresh


@pytest.mark.parametrize("n", [2, 5, 40])
def test_who_does_the_work_changes_nothing(n: int) -> None:
    alone, shared = (with_dropout(window=5, batches=6, replicas=hdet.replicate, n=count) for count in (1, n))
    assert trained_alike(shared) == trained_alike(alone)


# -- sign and size --------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [hdet.micro_batches, hdet.replicate])
@pytest.mark.parametrize("n", [1, 3])
def test_the_slope_is_what_one_step_does_to_the_probe(replicas: Any, n: int) -> None:
    assert slope_of(make([quiet()], replicas=replicas, n=n)) == pytest.approx(ONE_STEP, rel=1e-3)


def test_training_a_step_again_says_the_same() -> None:
    """With the batches' mean gradient, at weights that were trained; dropout's own random numbers."""
    engine = with_dropout(window=40, windows=2, batches=8, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.05))
    estimate = trained_alike(engine, lambda step: examples(1000 + step % 4, 16))
    (collector,) = engine.cycle.collectors
    assert isinstance(collector, MixedDifferenceCollector)
    scene, levels = collector.scene, collector.levels
    assert scene.objective is not None
    model = scene.replicas.hosts[0][0]
    live, held_out = tensors.parameters(model), []
    for sign in (1.0, -1.0):
        levels.write(79, 0, sign * levels.half[0])
        steps = []
        for j, batch in enumerate(scene.objective.draw(1)):
            with seeded([], f"0:1:dropout:{j}"):
                steps.append(torch.autograd.grad(cross_entropy(model, batch), list(model.parameters())))
        ahead = [p - 0.05 * torch.stack(own).mean(dim=0) for p, own in zip(live, zip(*steps, strict=True), strict=True)]
        with tensors.substituted(live, ahead):
            held_out.append(float(scene.probe.measure(model, 1).mean()))
    again = (held_out[0] - held_out[1]) / (2 * levels.half[0])
    assert estimate["slope"] == pytest.approx(again, rel=0.05)


def normalised(bias: bool) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.Tanh(), hdet.nn.Dropout(0.3), nn.Linear(16, 10))
        nn.init.zeros_(model[0].bias)
        if not bias:
            model[0].bias = None
        return model


def test_weights_that_training_does_not_feel_do_not_use_up_the_distance() -> None:
    """A bias before BatchNorm has no gradient in training, and Adam's P for it is millions of times too large."""
    told = []
    for bias in (True, False):
        engine = make(
            [hdet.Dropout(evidence=MixedDifference(), controller=Hold())],
            model=lambda bias=bias: normalised(bias),
            optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.003),
            loss=cross_entropy,
            batches=[examples(100 + j) for j in range(8)],
            probe=cross_entropy,
            held_out=[examples(50 + j) for j in range(4)],
            window=60,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            told.append(
                slope_of(engine, "dropout", loss=cross_entropy, batch=lambda step, index: examples(1000 + step))
            )
    assert told[0] == pytest.approx(told[1], rel=0.01)


def test_momentum_counts_a_gradient_for_all_it_will_do() -> None:
    engine = make([quiet()], optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=RATE, momentum=0.75))
    assert slope_of(engine) == pytest.approx(4 * ONE_STEP, rel=1e-3)


def test_maximising_turns_the_sign() -> None:
    engine = make([quiet()], optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=RATE, maximize=True))
    assert slope_of(engine) == pytest.approx(-ONE_STEP, rel=1e-3)


def test_the_standard_error_is_the_batches_own() -> None:
    (record,) = train(make([quiet()], batches=(0.5, 1.0, 1.5)))
    assert record.estimates["quiet_in_mixed_tests"]["stderr"] == pytest.approx(
        abs(ONE_STEP) * 0.5 / math.sqrt(3), rel=3e-3
    )


def test_a_knob_without_effect_is_told_to_have_one_in_a_twentieth_of_the_windows() -> None:
    """Its effect on the gradient is noise without a mean; by 32 batches |t| > 2 has a probability of 5.4 %."""

    def noise(model: Any, seed: int) -> Tensor:
        own = torch.randn(3, generator=torch.Generator().manual_seed(seed))
        loss: Tensor = SLOPE @ model.w + model.a * (own @ model.w)
        return loss

    windows = 250
    engine = make(
        [quiet()],
        window=1,
        windows=windows,
        loss=noise,
        batches=lambda window: range(32 * window, 32 * (window + 1)),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e-6),
    )
    records = train(engine, loss=lambda model, batch: SLOPE @ model.w)
    ts = np.array([record.estimates["quiet_in_mixed_tests"]["t"] for record in records])
    assert 0.02 < (np.abs(ts) > 2.0).mean() < 0.09
    assert ts.std() == pytest.approx(1.0, abs=0.15)


# -- knobs that act in eval mode too --------------------------------------------------------------


class Tempered(nn.Module):
    """y = w x / T."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))
        self.t = 2.0


def miss(model: Any, target: float) -> Tensor:
    loss: Tensor = (model.w / model.t - target).square()
    return loss


@pytest.mark.filterwarnings("ignore:no weight of replica")
@pytest.mark.parametrize(("steps", "rate", "probed"), [(1, 1e-9, 2.0), (4, 0.01, 2.0), (4, 0.02, 0.2)])
def test_a_temperature_is_judged_by_what_it_does_and_by_what_is_learned(steps: int, rate: float, probed: float) -> None:
    engine = make(
        [hdet.Scalar("t", path="t", bounds=(0.1, 10), spread=TwoLevel(0.05), evidence=MixedDifference())],
        model=Tempered,
        window=steps,
        windows=2,
        loss=miss,
        batches=(2.0, 2.0),
        probe=miss,
        held_out=(probed, probed),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=rate),
    )
    engine.knobs[0].controller = Hold()
    first, _ = train(engine, loss=miss, batch=lambda step, index: 2.0)

    def again(t: float) -> float:
        twin = Tempered()
        twin.t = t
        optimizer = torch.optim.SGD(twin.parameters(), lr=rate)
        for _ in range(steps):
            miss(twin, 2.0).backward()
            optimizer.step()
            optimizer.zero_grad()
        return miss(twin, probed).item()

    want = (again(2.0 * math.exp(0.05)) - again(2.0 * math.exp(-0.05))) / 0.1
    assert abs(want) > 0.05
    assert first.estimates["t"]["slope"] == pytest.approx(want, rel=0.1)


# -- bounds ---------------------------------------------------------------------------------------


def leaky(model: Any, factor: float) -> Tensor:
    loss: Tensor = factor * (1.0 - model.late) * (SLOPE @ model.w)
    return loss


def test_on_its_bound_the_estimate_is_taken_between_the_levels() -> None:
    engine = make([on_bound(MixedDifference(bound_from=0.0))], loss=leaky, windows=2)
    _, record = train(engine, loss=leaky, report=lambda step, own: torch.tensor(1e6 if step < 8 else -1e6))
    estimate = record.estimates["quiet_in_mixed_tests"]
    assert estimate["offset"] == pytest.approx(0.15)
    want = -RATE * float(AIM @ SLOPE) * -(math.sin(0.3) ** 2) / 0.3
    assert estimate["slope"] == pytest.approx(want, rel=3e-3)


@pytest.mark.parametrize(("training", "first"), [(0.8, 3), (0.99, None)])
def test_on_its_bound_it_is_looked_at_late_and_where_held_out_loss_exceeds_training_loss(
    training: float, first: int | None
) -> None:
    # The held-out loss is 1 whatever the weights, and has a gradient all the same.
    engine = make(
        [on_bound()], window=5, windows=10, probe=lambda model, batch: batch + AIM @ model.w - (AIM @ model.w).detach()
    )
    records = train(engine, report=lambda step, own: torch.tensor(training))
    told = [record.estimates["quiet_in_mixed_tests"]["stderr"] for record in records]
    looked = [number for number, stderr in enumerate(told) if math.isfinite(stderr)]
    assert looked == ([] if first is None else list(range(first, 10)))


def test_a_loss_divided_by_the_micro_batches_is_no_sign_of_overfitting() -> None:
    def level(model: Any, batch: float) -> Tensor:
        return batch + AIM @ model.w - (AIM @ model.w).detach()

    engine = make([on_bound(MixedDifference(bound_from=0.0))], window=5, windows=3, probe=level)
    with pytest.warns(UserWarning, match="not on one scale"):
        records = train(engine, report=lambda step, own: torch.tensor(0.5))
    assert not any(math.isfinite(record.estimates["quiet_in_mixed_tests"]["stderr"]) for record in records)


# -- what it costs, and what it leaves alone ------------------------------------------------------


@pytest.mark.parametrize("replicas", [hdet.micro_batches, hdet.replicate])
def test_a_window_takes_four_passes_a_batch_and_one_gradient_of_the_probe(replicas: Any) -> None:
    passes: list[float] = []
    probes: list[bool] = []

    def counted(model: Any, batch: float) -> Tensor:
        passes.append(model.a)
        return scaled(model, batch)

    def probed(model: Any, batch: float) -> Tensor:
        probes.append(torch.is_grad_enabled())
        return read_out(model, batch)

    train(make([quiet()], replicas=replicas, n=4, windows=2, loss=counted, batches=(1.0,) * 6, probe=probed))
    assert len(passes) == 2 * 4 * 6
    assert sorted(set(passes)) == pytest.approx([SCALE * math.exp(-WIDTH), SCALE * math.exp(WIDTH)])
    assert probes == [True] * 2 * 2


def test_only_every_so_many_windows_are_measured() -> None:
    records = train(make([quiet(evidence=MixedDifference(every=3))], windows=7))
    known = [math.isfinite(record.estimates["quiet_in_mixed_tests"]["stderr"]) for record in records]
    assert known == [False, False, True, False, False, True, False]


def test_a_controller_that_no_longer_listens_is_not_measured_for() -> None:
    passes: list[float] = []

    def counted(model: Any, batch: float) -> Tensor:
        passes.append(batch)
        return scaled(model, batch)

    train(make([quiet(controller=Gated(0.1, until=0.5))], windows=4, loss=counted))
    assert len(passes) == 4 * 2


class Restless(nn.Module):
    """Batch statistics, a buffer and a plain attribute that each pass replaces, dropout, a part that stays in eval.

    And noise by a generator of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.Tanh(), hdet.nn.Dropout(0.3))
        self.frozen = nn.BatchNorm1d(16).eval()
        self.head = nn.Linear(16, 10)
        self.register_buffer("seen", torch.zeros(()))
        self.carried = torch.zeros(16)
        self.draws = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + 1
            x = x + 0.1 * torch.randn(x.shape, generator=self.draws)
        inner = self.body(x) + self.carried
        self.carried = 0.5 * inner.detach().mean(0)
        out: Tensor = self.head(self.frozen(inner))
        return out


def restless() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Restless()


def ended(knobs: list[hdet.Knob], seen: list[tuple[bool, ...]] | None = None, **options: Any) -> dict[str, Any]:
    """What is left of a run that seeded torch once: weights, buffers, optimizer, random numbers."""

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        if seen is not None:
            seen.append((model.training, model.body.training, model.frozen.training, torch.is_grad_enabled()))
        return cross_entropy(model, batch)

    engine = make(
        knobs,
        model=restless,
        loss=loss,
        batches=[examples(100 + j) for j in range(3)],
        probe=cross_entropy,
        held_out=[examples(50 + j) for j in range(4)],
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
        window=5,
        windows=3,
        **options,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        train(engine, loss=cross_entropy, batch=lambda step, index: examples(1000 + step))
        model, optimizer = engine.hosts[0]
        return {
            "model": model.state_dict(),
            "optimizer": list(optimizer.state.values()),
            "numbers": torch.get_rng_state(),
            "own numbers": model.draws.get_state(),
            "modes": [module.training for module in model.modules()],
        }


@pytest.mark.parametrize("explored", [0.0, 0.1])
def test_training_goes_on_as_without_it_bit_for_bit(explored: float) -> None:
    """Also beside a knob that has replicas come apart."""
    rate = hdet.LearningRate(evidence=hdet.evidence.Divergent(), spread=TwoLevel(explored), controller=Hold())
    home = {"replicas": hdet.replicate, "n": 2}
    seen: list[tuple[bool, ...]] = []
    before = (random.getstate(), str(np.random.get_state(legacy=False)))
    with_it = ended([rate, hdet.Dropout(evidence=MixedDifference(), controller=Hold())], seen, **home)
    assert (random.getstate(), str(np.random.get_state(legacy=False))) == before
    without = ended([rate], **home)
    assert set(seen) == {(True, True, False, False)}
    assert len(seen) == 3 * 4 * 3
    for name, value in without["model"].items():
        assert torch.equal(value, with_it["model"][name]), name
    for ours, plain in zip(with_it["optimizer"], without["optimizer"], strict=True):
        assert all(torch.equal(ours[name], value) for name, value in plain.items())
    for numbers in ("numbers", "own numbers"):
        assert torch.equal(with_it[numbers], without[numbers])
    assert with_it["modes"] == without["modes"]


class Counting(Vector):
    """A frozen parameter that each pass in training mode moves, as a teacher that follows."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = nn.Parameter(torch.zeros(()), requires_grad=False)


def counted(model: Any, batch: float) -> Tensor:
    if model.training:
        with torch.no_grad():
            model.passes.add_(1.0)
    return scaled(model, batch)


def test_a_frozen_parameter_that_passes_write_is_put_back_but_for_the_first_time() -> None:
    engine = make([quiet()], model=Counting, loss=counted, windows=3)
    train(engine, loss=counted)
    assert float(engine.replicas[0].model.passes) == 3 * 8 + 1


def test_a_graph_that_is_held_goes_backward_after_a_window_was_closed() -> None:
    """As that of a loss whose optimizer steps later."""
    model = Restless()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = Engine(
        hdet.micro_batches(model, optimizer, n=1),
        [hdet.Dropout(evidence=MixedDifference(), controller=Hold())],
        window=1,
        signal=Probe(cross_entropy, [examples(50 + j) for j in range(4)]),
        objective=Objective(cross_entropy, [examples(100 + j) for j in range(3)]),
        total_steps=1,
    )
    with engine.replicas[0]:
        loss = cross_entropy(model, examples(0))
        loss.backward()
    optimizer.step()
    held = cross_entropy(model, examples(1))
    record = engine.step(loss.detach())
    assert record is not None
    assert record.estimates["dropout"]["stderr"] < math.inf
    held.backward()


class Rows(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.rows = nn.Embedding(10, 4, sparse=sparse)
        self.a = SCALE


def looked_up(model: Any, row: int) -> Tensor:
    loss: Tensor = model.a * model.rows(torch.tensor([row, 3])).square().sum()
    return loss


def test_a_sparse_gradient_of_the_probe_is_as_a_dense_one() -> None:
    def slope(sparse: bool) -> float:
        options: dict[str, Any] = {"loss": looked_up, "probe": looked_up, "batches": (0, 1), "held_out": (1, 2)}
        return slope_of(
            make([quiet()], model=lambda: Rows(sparse), **options), loss=looked_up, batch=lambda step, index: step
        )

    assert slope(True) == pytest.approx(slope(False), rel=1e-4)
    assert slope(True) < 0.0


def test_complex_parameters_are_refused() -> None:
    class Turned(Vector):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.ones(2, dtype=torch.complex64))

    with pytest.raises(ConfigError, match="complex parameters, along which MixedDifference evidence cannot look"):
        make([quiet()], model=Turned)


class Buffered(Vector):
    """Two knobs that are buffers."""

    def __init__(self) -> None:
        super().__init__()
        del self.a, self.late
        self.register_buffer("a", torch.tensor(SCALE))
        self.register_buffer("late", torch.tensor(1.0))


def test_knobs_that_are_buffers_run_at_their_levels_and_those_of_other_evidence_at_their_base() -> None:
    """Buffers are put back after every pass, and a knob's value is not written where it is thought to be in force."""
    seen: list[tuple[float, float]] = []

    def watched(model: Any, batch: float) -> Tensor:
        seen.append((float(model.a), float(model.late)))
        return scaled(model, batch)

    other = quiet("late", evidence=hdet.evidence.Contrast()).replace(name="other")
    engine = make([quiet(), other], n=4, model=Buffered, loss=watched)
    train(engine)
    assert [late for _, late in seen] == [1.0] * 8
    assert [a for a, _ in seen] == pytest.approx([SCALE * math.exp(WIDTH), SCALE * math.exp(-WIDTH)] * 4)
    model = engine.replicas[0].model
    assert (float(model.a), float(model.late)) == (SCALE, 1.0)


class Expanded(Vector):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(1, 3).expand(3, 3))


def test_a_buffer_that_cannot_be_written_over_is_no_matter() -> None:
    assert slope_of(make([quiet()], model=Expanded)) == slope_of(make([quiet()]))


def test_a_model_in_eval_mode_is_measured_in_training_mode_and_put_back() -> None:
    modes: list[bool] = []

    def watched(model: Any, batch: float) -> Tensor:
        modes.append(model.training)
        return scaled(model, batch)

    engine = make([quiet()], loss=watched)
    engine.replicas[0].model.eval()
    train(engine)
    assert set(modes) == {True}
    assert not engine.replicas[0].model.training


def test_weights_are_put_back_where_the_loss_raises() -> None:
    def failing(model: Any, batch: float) -> Tensor:
        raise RuntimeError("no such batch")

    engine = make([quiet()], loss=failing)
    expected = Vector().w.detach() - 8 * RATE * SCALE * SLOPE
    with pytest.raises(RuntimeError, match="no such batch"):
        train(engine)
    assert torch.allclose(engine.replicas[0].model.w.detach(), expected)
    assert engine.replicas[0].model.a == SCALE


# -- nothing to tell ------------------------------------------------------------------------------


def constant(model: Any, batch: float) -> Tensor:
    loss: Tensor = batch + 0.0 * model.w.sum()
    return loss


@pytest.mark.parametrize(
    "options",
    [
        {"probe": constant},
        {"optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.0)},
        {"loss": lambda model, batch: scaled(model, math.nan if batch > 1 else 1.0)},
    ],
    ids=["no gradient", "no rate", "not finite"],
)
def test_where_there_is_nothing_to_tell_nothing_is_told(options: Any) -> None:
    (record,) = train(make([quiet()], **options))
    estimate = record.estimates["quiet_in_mixed_tests"]
    assert (estimate["slope"], estimate["t"]) == (0.0, 0.0)
    assert math.isinf(estimate["stderr"])


# -- refusals -------------------------------------------------------------------------------------


def test_without_an_objective_it_is_refused() -> None:
    model = Vector()
    with pytest.raises(ConfigError, match=r"was not told how; give the engine objective=hdet\.Objective"):
        Engine(hdet.micro_batches(model, sgd(model), n=1), [quiet()], signal=Probe(read_out, (1.0, 1.0)))


def test_what_is_no_objective_is_refused() -> None:
    model = Vector()
    with pytest.raises(ConfigError, match="objective must be of type Objective"):
        Engine(hdet.micro_batches(model, sgd(model), n=1), [quiet()], objective=scaled)  # type: ignore[arg-type]


def test_local_gradients_are_refused() -> None:
    with pytest.raises(IdentifiabilityError, match="weights that all replicas share"):
        make([quiet()], replicas=hdet.replicate, n=2, gradients="local")


def test_an_objective_of_one_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"at least 2 training batches.*got 1"):
        Objective(scaled, (1.0,))
    with pytest.raises(StepError, match="1 training batches in window 0 and needs at least 2"):
        train(make([quiet()], batches=lambda window: [1.0]))
    with pytest.raises(ConfigError, match="loss must be callable"):
        Objective(1.0, (1.0, 1.0))  # type: ignore[arg-type]


def test_a_loss_that_is_no_number_is_refused() -> None:
    with pytest.raises(StepError, match=r"must return one number.*got \(3,\)"):
        train(make([quiet()], loss=lambda model, batch: model.w))
    with pytest.raises(StepError, match="the objective's loss is complex"):
        train(make([quiet()], loss=lambda model, batch: model.w.sum() * 1j))


# -- gradients apart from training ----------------------------------------------------------------


def test_a_gradient_apart_from_training_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2))
    model[1].bias.requires_grad_(False)
    model[0].weight.grad = torch.ones(4, 3)
    batches = [torch.randn(5, 3) for _ in range(3)]
    own = tensors.trained(model)
    found = gradients.summed(model, (model[1](model[0](x)).square().mean() for x in batches))
    expected = torch.autograd.grad(
        sum((model[1](model[0](x)).square().mean() for x in batches), torch.zeros(())), own[:3]
    )
    assert len(found) == len(own) == 5
    for ours, theirs in zip(found[:3], expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not any(part.any() for part in found[3:])
    assert torch.equal(model[0].weight.grad, torch.ones(4, 3))
    assert all(parameter.grad is None for parameter in own[1:])


def test_a_damage_of_the_probe_that_comes_back_is_told_of_anew() -> None:
    damaged = (1, 3, 4)
    engine = make([quiet()], held_out=lambda window: (1.0, math.nan if window in damaged else 1.0), windows=6)
    with pytest.warns(UserWarning, match="mixed_difference took its gradient, so that it learned nothing") as told:
        train(engine)
    assert [str(warning.message).partition(" the ")[0] for warning in told] == ["in window 1", "in window 3"]


def test_a_sub_batch_of_the_probe_that_is_not_finite_is_told_of_once() -> None:
    engine = make([quiet()], held_out=(1.0, math.nan), windows=3)
    with pytest.warns(UserWarning, match="mixed_difference took its gradient, so that it learned nothing") as told:
        records = train(engine)
    assert len(told) == 1
    assert [record.estimates["quiet_in_mixed_tests"]["t"] for record in records] == [0.0] * 3
