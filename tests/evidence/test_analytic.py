"""Analytic evidence: the direction of weight decay against runs that were trained again with another decay."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import explicit_loop
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import hdet
from hdet import Engine, Probe
from hdet.controllers import Hold
from hdet.errors import ConfigError
from hdet.evidence import Analytic
from hdet.evidence.analytic import AnalyticCollector, Pull, _stepped
from hdet.schedules import Replay
from hdet.spaces import Linear
from hdet.spreads import TwoLevel

T, RATE, DECAY = 40, 0.01, 0.2
START = torch.tensor([3.0, 1.0, 4.0])
TARGET = torch.tensor([1.0, -2.0, 0.5])

Make = Callable[[nn.Module, float], Optimizer]


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(START.clone())
        self.other = nn.Parameter(START.clone())


def noisy(model: Any, step: int, stream: int = 0) -> Tensor:
    """Gradients that are mostly noise, as late in training."""
    noise = torch.randn(3, generator=torch.Generator().manual_seed(1000 * stream + step))
    loss: Tensor = (0.1 * TARGET + noise) @ (model.w + model.other)
    return loss


def read_out(model: Any, batch: float) -> Tensor:
    """Linear in the weights, so that its slope along D is D's component, wherever it is read."""
    loss: Tensor = batch * (TARGET @ model.w)
    return loss


MAKES: dict[str, Make] = {
    "adamw": lambda m, decay: AdamW(m.parameters(), lr=RATE, weight_decay=decay),
    "sgd": lambda m, decay: SGD(m.parameters(), lr=RATE, weight_decay=decay),
    "sgd with momentum": lambda m, decay: SGD(m.parameters(), lr=RATE / 3, momentum=0.5, weight_decay=decay),
    "adam": lambda m, decay: Adam(m.parameters(), lr=RATE, betas=(0.5, 0.999), weight_decay=decay),
    "sgd that maximises": lambda m, decay: SGD(m.parameters(), lr=RATE, weight_decay=decay, maximize=True),
}


def retrained(
    make: Make, base: float, decay: float, warm: int, rate: Callable[[int], float] | None, stream: int = 0
) -> float:
    """What the probe reads after `warm` steps at one decay and T at another."""
    model = Vector()
    optimizer = make(model, base)
    for step in range(warm + T):
        group = optimizer.param_groups[0]
        group["weight_decay"] = decay if step >= warm else base
        if rate is not None:
            group["lr"] = rate(step)
        noisy(model, step, stream).backward()
        optimizer.step()
        optimizer.zero_grad()
    return read_out(model, 1.0).item()


def difference(
    make: Make, decay: float = DECAY, warm: int = 0, rate: Callable[[int], float] | None = None, stream: int = 0
) -> float:
    """d probe / d log(decay in the last T steps), by training twice."""
    h = 0.1
    ends = [retrained(make, decay, decay * math.exp(side * h), warm, rate, stream) for side in (1, -1)]
    return (ends[0] - ends[1]) / (2 * h)


def knob(evidence: Analytic) -> hdet.WeightDecay:
    return hdet.WeightDecay(evidence=evidence, controller=Hold())


def run(
    optimizer: Callable[[nn.Module], Optimizer],
    knobs: list[hdet.Knob] | None = None,
    *,
    windows: int = 1,
    probe: Any = read_out,
    batches: tuple[float, ...] = (1.0, 1.0),
    replicas: Callable[[nn.Module, Optimizer], Any] = lambda m, o: hdet.micro_batches(m, o, n=1),
    window: int = T,
    loss: Any = noisy,
) -> tuple[Engine, list[hdet.history.WindowRecord]]:
    model = Vector()
    engine = Engine(
        replicas(model, optimizer(model)),
        knobs if knobs is not None else [knob(Analytic())],
        window=window,
        signal=Probe(probe, batches),
        total_steps=window * windows,
    )
    return engine, explicit_loop.train(engine, loss=lambda model, step, index: loss(model, step))


@pytest.mark.parametrize(
    ("name", "decay", "tolerance"),
    [
        ("adamw", 0.2, 0.02),
        ("sgd", 0.2, 0.02),
        ("sgd with momentum", 0.2, 0.05),
        ("adam", 0.02, 0.2),
        ("sgd that maximises", 0.2, 0.02),
    ],
)
def test_the_slope_is_that_of_training_again(name: str, decay: float, tolerance: float) -> None:
    """Where weights decay little in a window (lr * decay * T is 0.08), and little of Adam's second moment is decay's.

    A gradient's momentum is taken as spent within the window, so memories here are short.
    """
    make = MAKES[name]
    # A second moment that has only just begun holds little but the gradient it divides.
    _, records = run(lambda m: make(m, decay), windows=3)
    want = difference(make, decay, warm=2 * T)
    record = records[-1]
    assert abs(want) > 0.05 * decay
    assert record.estimates["weight_decay"]["slope"] == pytest.approx(want, rel=tolerance)


@pytest.mark.parametrize("decay", [2.5, 5.0, 10.0])
def test_where_weights_decay_away_in_a_window_the_mean_slope_is_that_of_training_again(decay: float) -> None:
    """Once, twice and four times over: a sum of pulls alone is read 1.6, 2.3 and 4 times too large.

    By the noise of a window: what its first steps moved has decayed by its end, and its mean weights still hold it.
    """
    make = MAKES["sgd"]
    slopes, wants = [], []
    for stream in range(24):
        _, records = run(lambda m: make(m, decay), windows=4, loss=partial(noisy, stream=stream))
        slopes.append(records[-1].estimates["weight_decay"]["slope"])
        wants.append(difference(make, decay, warm=3 * T, stream=stream))
    assert sum(slopes) == pytest.approx(sum(wants), rel=0.15)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("elements", [None, slice(1, 3)])
def test_through_adams_preconditioner_each_weight_decays_by_a_pull_of_its_own(
    maximize: bool, elements: slice | None
) -> None:
    weights = nn.Parameter(START.clone())
    optimizer = Adam([weights], lr=RATE, betas=(0.0, 0.0), eps=1e-12, weight_decay=DECAY, maximize=maximize)
    weights.grad = torch.tensor([0.1, 1.0, 10.0])
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.0  # of the window's last step; `total` has the rates of all
    root = optimizer.state[weights]["exp_avg_sq"].sqrt()
    total = 3.0
    moved = Pull(optimizer, optimizer.param_groups[0], total, is_direct=False).through_gradient(
        weights, START[elements] if elements else START, elements
    )
    expected = -(1 - (-total / root).exp()) * START
    torch.testing.assert_close(moved, expected[elements] if elements else expected)


def test_a_rate_that_changes_in_the_window_counts_step_by_step() -> None:
    rates = [RATE * (1 + step % 7) for step in range(T)]
    knobs: list[hdet.Knob] = [
        knob(Analytic()),
        hdet.LearningRate(schedule=Replay(rates), evidence=hdet.evidence.Line(), controller=Hold()),
    ]
    _, (record,) = run(lambda m: SGD(m.parameters(), lr=RATE, weight_decay=DECAY), knobs)
    want = difference(MAKES["sgd"], rate=lambda step: rates[step])
    assert record.estimates["weight_decay"]["slope"] == pytest.approx(want, rel=0.25)
    constant = difference(MAKES["sgd"])
    assert abs(record.estimates["weight_decay"]["slope"]) > 2.5 * abs(constant)


def mean_weights(decay: float = DECAY) -> Tensor:
    """Of a window in which decay alone moves w, with no gradient."""
    w, mean = START.double(), torch.zeros(3, dtype=torch.float64)
    for _ in range(T):
        w = w * (1 - RATE * decay)
        mean += w / T
    return mean


def pull(decay: float = DECAY) -> Tensor:
    """-(1 - exp(-lr decay T)) mean_t(w): what decay did to w, and what its own pull left of that."""
    return math.expm1(-RATE * decay * T) * mean_weights(decay)


def silent(model: Any, step: int) -> Tensor:
    loss: Tensor = 0.0 * (model.w.sum() + model.other.sum())
    return loss


@pytest.mark.parametrize("make", [AdamW, SGD])
def test_the_direction_by_hand(make: Any) -> None:
    """Without a gradient, decay alone moves the weights; slopes are d . D and curvatures |D|^2."""

    def bowl(model: Any, batch: float) -> Tensor:
        loss: Tensor = 0.5 * (model.w @ model.w) + batch
        return loss

    def optimizer(model: nn.Module) -> Optimizer:
        made: Optimizer = make(model.parameters(), lr=RATE, weight_decay=DECAY)
        return made

    _, (linear,) = run(optimizer, loss=silent)
    moved = pull()
    assert linear.estimates["weight_decay"]["slope"] == pytest.approx(float(TARGET.double() @ moved), rel=1e-4)
    _, (curved,) = run(
        optimizer, [knob(Analytic(points=(-1.0, 0.0, 1.0)))], loss=silent, probe=bowl, batches=(0.0, 0.0)
    )
    estimate = curved.estimates["weight_decay"]
    centre = mean_weights()
    assert estimate["slope"] == pytest.approx(float(centre @ moved), rel=1e-4)
    assert estimate["curvature"] == pytest.approx(float(moved @ moved), rel=1e-2)


# -- where the points lie -------------------------------------------------------------------------


def standard(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)


STRONG = 5.0  # lr * decay * T = 2: D nearly reaches the origin


def strongly(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=RATE, weight_decay=STRONG)


@pytest.mark.parametrize("reach", [0.1, 0.02])
def test_strong_decay_is_read_within_reach(reach: float) -> None:
    """The furthest point moves the weights that decay by `reach` of their norm, however long D is."""
    seen: list[Tensor] = []

    def watched(model: Any, batch: float) -> Tensor:
        seen.append(torch.cat([model.w, model.other]).detach().double())
        return read_out(model, batch)

    _, (record,) = run(strongly, [knob(Analytic(reach=reach, points=(-1.0, 0.5)))], probe=watched, loss=silent)
    centre = mean_weights(STRONG).repeat(2)
    moved = sorted({round(float((at - centre).norm() / centre.norm()), 5) for at in seen})
    assert moved == pytest.approx([reach / 2, reach], rel=1e-3)
    # The probe is linear in the weights, so that its slope is the same wherever it is read.
    want = float(TARGET.double() @ pull(decay=STRONG))
    assert record.estimates["weight_decay"]["slope"] == pytest.approx(want, rel=1e-3)


def test_weak_decay_is_read_a_width_away() -> None:
    """lr * decay * T = 0.08 lies within reach, and 0.04 more so."""
    for width in (1.0, 0.5):
        seen: list[Tensor] = []

        def watched(model: Any, batch: float, seen: list[Tensor] = seen) -> Tensor:
            seen.append(model.w.detach().double().clone())
            return read_out(model, batch)

        run(
            lambda m: AdamW(m.parameters(), lr=RATE, weight_decay=DECAY),
            [knob(Analytic(width=width))],
            probe=watched,
            loss=silent,
        )
        torch.testing.assert_close(seen[-1] - seen[0], 2 * width * pull(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("decay", [DECAY, STRONG])
def test_it_tells_the_share_of_the_weights_that_decay_took(decay: float) -> None:
    _, (record,) = run(lambda model: AdamW(model.parameters(), lr=RATE, weight_decay=decay), loss=silent)
    moved, centre = pull(decay=decay), mean_weights(decay)
    assert record.estimates["weight_decay"]["stretch"] == pytest.approx(float(moved.norm() / centre.norm()), rel=1e-4)


def test_a_curvature_takes_three_points_and_one_point_is_refused() -> None:
    _, (two,) = run(standard)
    assert two.estimates["weight_decay"]["curvature"] is None
    _, (three,) = run(standard, [knob(Analytic(points=(-1.0, 0.0, 1.0)))])
    assert three.estimates["weight_decay"]["curvature"] is not None
    with pytest.raises(ConfigError, match="2 distinct points"):
        Analytic(points=(1.0, 1.0))


def test_the_level_is_the_mean_probe_loss() -> None:
    """Linear along D, so that points about the centre have the centre's loss for their mean."""
    _, (record,) = run(standard, batches=(1.0, 1.3, 0.7, 1.2), loss=silent)
    centre = mean_weights()
    assert record.estimates["weight_decay"]["level"] == pytest.approx(1.05 * float(TARGET.double() @ centre), rel=1e-4)


def test_each_window_sums_anew() -> None:
    """Weights shrink from window to window, by a factor that is known, and so does the slope."""
    _, records = run(lambda m: AdamW(m.parameters(), lr=RATE, weight_decay=DECAY), windows=3, loss=silent)
    slopes = [record.estimates["weight_decay"]["slope"] for record in records]
    shrink = (1 - RATE * DECAY) ** T
    assert slopes[1] == pytest.approx(slopes[0] * shrink, rel=1e-4)
    assert slopes[2] == pytest.approx(slopes[1] * shrink, rel=1e-4)


def test_sub_batches_give_the_standard_error() -> None:
    scales = torch.tensor([1.0, 1.3, 0.7, 1.2], dtype=torch.float64)
    _, (record,) = run(
        lambda m: AdamW(m.parameters(), lr=RATE, weight_decay=DECAY), batches=tuple(scales.tolist()), loss=silent
    )
    each = scales * float(TARGET.double() @ pull())
    estimate = record.estimates["weight_decay"]
    assert estimate["slope"] == pytest.approx(float(each.mean()), rel=1e-4)
    assert estimate["stderr"] == pytest.approx(float(each.std()) / 2, rel=1e-3)


def test_only_groups_that_decay_are_pulled() -> None:
    """And by their own rates and decays."""
    seen: list[tuple[float, float]] = []

    def watched(model: Any, batch: float) -> Tensor:
        seen.append((float(model.w[0]), float(model.other[0])))
        return read_out(model, batch)

    def optimizer(model: Any) -> Optimizer:
        return AdamW(
            [{"params": [model.w], "weight_decay": DECAY, "lr": RATE}, {"params": [model.other], "weight_decay": 0.0}],
            lr=RATE,
        )

    _, (record,) = run(optimizer, probe=watched, loss=silent)
    assert len({other for _, other in seen}) == 1
    assert len({w for w, _ in seen}) == 2
    slope = record.estimates["weight_decay"]["slope"]
    assert slope == pytest.approx(float(TARGET.double() @ pull()), rel=1e-4)


def test_groups_keep_their_ratios() -> None:
    def both(model: Any, batch: float) -> Tensor:
        return read_out(model, batch) + TARGET @ model.other

    def optimizer(model: Any) -> Optimizer:
        return AdamW(
            [{"params": [model.w], "weight_decay": DECAY}, {"params": [model.other], "weight_decay": 3 * DECAY}],
            lr=RATE,
        )

    _, (record,) = run(optimizer, probe=both, loss=silent)
    want = float(TARGET.double() @ (pull() + pull(decay=3 * DECAY)))
    assert record.estimates["weight_decay"]["slope"] == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("n", [1, 4])
def test_copies_agree_with_one_model(n: int) -> None:
    def optimizer(model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)

    _, (one,) = run(optimizer)
    _, (many,) = run(optimizer, replicas=lambda m, o: hdet.replicate(m, o, n=n))
    assert many.estimates["weight_decay"]["slope"] == pytest.approx(one.estimates["weight_decay"]["slope"], rel=1e-5)


def test_copies_that_come_apart_by_their_rates_decay_by_the_base_of_these() -> None:
    rate = hdet.LearningRate(evidence=hdet.evidence.Divergent(), spread=TwoLevel(0.5), controller=Hold())
    silenced = [
        run(make, knobs, replicas=lambda m, o: hdet.replicate(m, o, n=2), loss=silent)[1][0].estimates["weight_decay"]
        for make in (standard, lambda m: SGD(m.parameters(), lr=RATE, weight_decay=DECAY))
        for knobs in ([rate, knob(Analytic())], None)
    ]
    for apart, alike in (silenced[:2], silenced[2:]):
        # The mean of the weights themselves lies off by next to nothing.
        assert apart["slope"] == pytest.approx(alike["slope"], rel=0.02)


def test_the_weights_are_left_as_they_were() -> None:
    model = Vector()
    optimizer = AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    for step in range(T):
        noisy(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine, _ = run(lambda m: AdamW(m.parameters(), lr=RATE, weight_decay=DECAY))
    assert torch.equal(engine.replicas[0].model.w, model.w)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (hdet.LearningRate(evidence=Analytic(), controller=Hold()), "Line for learning rates"),
        (hdet.WeightDecay(evidence=Analytic(), space=Linear(0.1)), r"space=hdet\.spaces\.Log"),
        (hdet.WeightDecay(evidence=Analytic(), groups="none of them"), "none of them"),
    ],
)
def test_what_it_cannot_judge_is_refused(given: hdet.Knob, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(lambda m: AdamW(m.parameters(), lr=RATE, weight_decay=DECAY), [given])


@pytest.mark.parametrize("kind", [AdamW, SGD, Adam])
def test_what_the_optimizer_leaves_alone_does_not_decay(kind: Any) -> None:
    """A part of the model that the loss does not reach has no gradient, and torch makes no step with it."""

    def unreached(model: Any, step: int) -> Tensor:
        noise = torch.randn(3, generator=torch.Generator().manual_seed(step))
        loss: Tensor = noise @ model.other
        return loss

    def optimizer(model: nn.Module) -> Optimizer:
        return kind(model.parameters(), lr=RATE, weight_decay=DECAY)  # type: ignore[no-any-return]

    _, (record,) = run(optimizer, loss=unreached)
    assert record.estimates["weight_decay"]["slope"] == 0.0


def test_weights_of_which_the_norm_alone_is_unchanged_have_been_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hdet.replicas.tensors.STRETCH", 4)
    begun = [torch.tensor([0.0, 0.0, 0.0, 0.0, 3.0, 4.0]) for _ in range(3)] + [torch.empty(0)]
    now = [begun[0].clone(), begun[1][[0, 1, 2, 3, 5, 4]], 2 * begun[2], torch.empty(0)]
    assert _stepped(begun, now) == [False, True, True, True]


def test_a_decay_that_the_loop_writes_counts_step_by_step() -> None:
    """Attached, a group's own decay is followed by the optimizer and by the evidence."""
    model = Vector()
    optimizer = AdamW([{"params": [model.w]}, {"params": [model.other]}], lr=RATE, weight_decay=DECAY)
    search = hdet.attach(
        model,
        optimizer,
        probe=Probe(lambda model, batch: read_out(model, batch) + 10.0 * (TARGET @ model.other), (1.0, 1.0)),
        knobs=[hdet.LearningRate(controller=Hold()), knob(Analytic())],
        schedule=None,
        total_steps=T,
        window=T,
        tail=None,
        guard=None,
        quiet=True,
    )
    for step in range(T):
        if step == T // 2:
            optimizer.param_groups[1]["weight_decay"] = 0.0
        search.loss(0.0 * (model.w + model.other).sum() + noisy(model, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    collector = next(own for own in search.engine.cycle.collectors if hasattr(own, "pulls"))
    assert collector.pulls == [pytest.approx([T * RATE * DECAY, T // 2 * RATE * DECAY])]


@pytest.mark.parametrize(
    ("apart", "entered"),
    [
        (hdet.LearningRate(evidence=hdet.evidence.Divergent()), True),
        (hdet.Momentum(evidence=hdet.evidence.Divergent()), False),
    ],
)
def test_bases_are_put_in_force_after_a_step_only_where_a_rate_sets_replicas_apart(
    apart: hdet.Knob, entered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    judged = hdet.Probe(lambda model, given: model(given).square().mean(1), [torch.ones(4, 2)])
    knobs = [apart, hdet.WeightDecay(evidence=hdet.evidence.Analytic())]
    engine = hdet.Engine(hdet.replicate(model, optimizer, n=2), knobs, window=5, total_steps=10, signal=judged)
    collector = next(one for one in engine.cycle.collectors if isinstance(one, AnalyticCollector))
    written: list[int] = []
    monkeypatch.setattr(engine.cycle.knobs[1], "write", lambda host, base: written.append(host))
    collector.after_update(engine.cycle.window, 1)
    assert bool(written) is entered
