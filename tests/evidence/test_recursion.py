"""Recursion evidence: the direction of momentum and betas against runs that were trained again with other values.

Gradients do not depend on the weights here, so that what the recursions leave out is zero, and training again agrees
up to the error of a central difference.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import explicit_loop
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RMSprop

import hdet
from hdet import Engine, Probe
from hdet.controllers import Controller, Hold
from hdet.errors import ConfigError
from hdet.evidence import Recursion
from hdet.schedules import Replay
from hdet.spaces import Arcsine, Linear, Log, Logit, Relative, Space
from hdet.spreads import TwoLevel

T, RATE, NUDGE = 12, 0.01, 2e-4
START = torch.tensor([3.0, 1.0, 4.0], dtype=torch.float64)
TARGET = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)

Make = Callable[[nn.Module], Optimizer]


class Vector(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.w = nn.Parameter(START.to(dtype, copy=True))
        self.other = nn.Parameter(START.to(dtype, copy=True))


def noisy(model: Any, step: int) -> Tensor:
    noise = torch.randn(3, generator=torch.Generator().manual_seed(step)).to(model.w.dtype)
    loss: Tensor = (0.5 * TARGET.to(model.w.dtype) + noise) @ (model.w + 0.3 * model.other)
    return loss


def seldom(model: Any, step: int) -> Tensor:
    """`w` has no gradient in most steps; the first is in the middle of the first window."""
    return noisy(model, step) if step % 5 == 3 else model.other.sum()


def read_out(model: Any, batch: float) -> Tensor:
    """Linear in the weights, so that its slope along D is D's component."""
    loss: Tensor = batch * (TARGET.to(model.w.dtype) @ (model.w - 3.0 * model.other))
    return loss


def retrained(
    make: Make, kind: type[hdet.Knob], course: Callable[[int], float], steps: int, loss: Any = noisy, rate: Any = None
) -> float:
    """What the probe reads after training with the knob at `course(step)`."""
    model = Vector()
    optimizer = make(model)
    binding = kind().bind(model, optimizer)
    for step in range(steps):
        binding.write(course(step))
        for group in optimizer.param_groups if rate is not None else ():
            group["lr"] = rate(step)
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return read_out(model, 1.0).item()


def difference(
    make: Make, knob: hdet.Knob, base: Callable[[int], float], warm: int, loss: Any = noisy, rate: Any = None
) -> float:
    """d probe / d (the knob's coordinate in the last T steps), by training twice."""
    ends = []
    for side in (NUDGE, -NUDGE):

        def course(step: int, side: float = side) -> float:
            return knob.space.apply(base(step), side if step >= warm else 0.0)

        ends.append(retrained(make, type(knob), course, warm + T, loss, rate))
    return (ends[0] - ends[1]) / (2 * NUDGE)


def run(
    make: Make,
    knobs: Sequence[hdet.Knob],
    *,
    windows: int = 1,
    window: int = T,
    loss: Any = noisy,
    probe: Any = read_out,
    batches: Sequence[float] = (1.0, 1.0),
    replicas: Callable[[nn.Module, Optimizer], Any] = lambda m, o: hdet.micro_batches(m, o, n=1),
    dtype: torch.dtype = torch.float64,
    evidence: hdet.evidence.Evidence | None = None,
) -> tuple[Engine, list[hdet.history.WindowRecord]]:
    model = Vector(dtype)
    engine = Engine(
        replicas(model, make(model)),
        list(knobs),
        window=window,
        signal=Probe(probe, batches),
        total_steps=window * windows,
        evidence=evidence,
    )
    return engine, train(engine, window * windows, loss)


def train(engine: Engine, until: int, loss: Any = noisy) -> list[hdet.history.WindowRecord]:
    return explicit_loop.train(engine, until, loss=lambda model, step, index: loss(model, step))


def held(kind: type[hdet.Knob], **options: Any) -> hdet.Knob:
    """A knob that Recursion judges and nobody moves."""
    return kind(evidence=Recursion(width=1e-3), controller=Hold(), **options)


def slope(record: hdet.history.WindowRecord) -> float:
    (estimate,) = record.estimates.values()
    found: float = estimate["slope"]
    return found


SGDS: dict[str, Make] = {
    "momentum": lambda m: SGD(m.parameters(), lr=RATE, momentum=0.8),
    "nesterov": lambda m: SGD(m.parameters(), lr=RATE, momentum=0.8, nesterov=True),
    "dampening": lambda m: SGD(m.parameters(), lr=RATE, momentum=0.8, dampening=0.4),
    "maximize": lambda m: SGD(m.parameters(), lr=RATE, momentum=0.8, maximize=True),
    "foreach": lambda m: SGD(m.parameters(), lr=RATE, momentum=0.8, foreach=True),
    "fused": lambda m: SGD(m.parameters(), lr=RATE, momentum=0.8, nesterov=True, fused=True),
    "tensor lr": lambda m: SGD(m.parameters(), lr=torch.tensor(RATE), momentum=0.8),
    "two groups": lambda m: SGD([{"params": [m.w], "lr": 3 * RATE}, {"params": [m.other]}], lr=RATE, momentum=0.8),
}
BETAS = (0.7, 0.9)
ADAMS: dict[str, Make] = {
    "adam": lambda m: Adam(m.parameters(), lr=RATE, betas=BETAS),
    "large eps": lambda m: Adam(m.parameters(), lr=RATE, betas=BETAS, eps=0.3),
    "adamw": lambda m: AdamW(m.parameters(), lr=RATE, betas=BETAS, weight_decay=2.0),
    "foreach": lambda m: AdamW(m.parameters(), lr=RATE, betas=BETAS, weight_decay=2.0, foreach=True),
    "fused": lambda m: AdamW(m.parameters(), lr=RATE, betas=BETAS, weight_decay=2.0, fused=True),
    "tensor lr": lambda m: AdamW(m.parameters(), lr=torch.tensor(RATE), betas=BETAS, weight_decay=2.0, fused=True),
    "maximize": lambda m: Adam(m.parameters(), lr=RATE, betas=BETAS, maximize=True),
    "two groups": lambda m: AdamW(
        [{"params": [m.w], "lr": 3 * RATE, "eps": 0.1}, {"params": [m.other], "weight_decay": 2.0}],
        lr=RATE,
        betas=BETAS,
    ),
}
CASES = [
    *((hdet.Momentum, name, make) for name, make in SGDS.items()),
    *((kind, name, make) for kind in (hdet.Beta1, hdet.Beta2) for name, make in ADAMS.items()),
]


@pytest.mark.parametrize("warm", [0, 2 * T])
@pytest.mark.parametrize(("kind", "name", "make"), CASES, ids=[f"{kind.__name__}-{name}" for kind, name, _ in CASES])
def test_the_slope_is_that_of_training_again(kind: type[hdet.Knob], name: str, make: Make, warm: int) -> None:
    """From the run's first step, where bias corrections are large, and from a window's opening later on."""
    knob = held(kind)
    model = Vector()
    base = knob.bind(model, make(model)).read()
    want = difference(make, knob, lambda step: base, warm)
    _, records = run(make, [knob], windows=1 + warm // T)
    assert abs(want) > 1e-4
    assert slope(records[-1]) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("space", [Logit(), Log(), Linear(0.1), Relative(), Arcsine()])
@pytest.mark.parametrize("kind", [hdet.Momentum, hdet.Beta1, hdet.Beta2])
def test_slopes_are_in_the_knobs_own_coordinate(kind: type[hdet.Knob], space: Space) -> None:
    make = SGDS["momentum"] if kind is hdet.Momentum else ADAMS["adam"]
    knob = held(kind, space=space, bounds=(0.1, 0.99))
    base = knob.bind(Vector(), make(Vector())).read()
    _, (record,) = run(make, [knob])
    assert slope(record) == pytest.approx(difference(make, knob, lambda step: base, 0), rel=1e-5)


@pytest.mark.parametrize("kind", [hdet.Momentum, hdet.Beta1, hdet.Beta2])
def test_values_and_rates_that_change_in_the_window_count_step_by_step(kind: type[hdet.Knob]) -> None:
    make = SGDS["nesterov"] if kind is hdet.Momentum else ADAMS["adamw"]
    course = [0.9 - 0.02 * (step % 7) for step in range(2 * T)]
    rates = [RATE * (1 + step % 5) for step in range(2 * T)]
    knob = held(kind, schedule=Replay(tuple(course)))
    rate = hdet.LearningRate(schedule=Replay(tuple(rates)), evidence=hdet.evidence.Line(), controller=Hold())
    _, records = run(make, [knob, rate], windows=2)
    want = difference(make, knob, course.__getitem__, T, rate=rates.__getitem__)
    assert records[-1].estimates[knob.label]["slope"] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("kind", [hdet.Beta1, hdet.Beta2])
def test_adam_counts_the_steps_of_each_parameter(kind: type[hdet.Knob]) -> None:
    """A parameter without a gradient is not stepped, and its means do not move."""
    knob, make = held(kind), ADAMS["adamw"]
    base = knob.bind(Vector(), make(Vector())).read()
    _, records = run(make, [knob], windows=2, loss=seldom)
    for record, warm in zip(records, (0, T), strict=True):
        want = difference(make, knob, lambda step: base, warm, loss=seldom)
        assert slope(record) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("kind", [hdet.Momentum, hdet.Beta1, hdet.Beta2])
def test_single_precision_will_do(kind: type[hdet.Knob]) -> None:
    """Beta2 at 0.999 in particular, where a gradient moves its mean by a thousandth."""

    def make(model: nn.Module) -> Optimizer:
        if kind is hdet.Momentum:
            return SGD(model.parameters(), lr=RATE, momentum=0.9)
        return AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.999))

    knob = held(kind).replace(evidence=Recursion(width=0.3, reach=1.0))
    base = knob.bind(Vector(), make(Vector())).read()
    _, records = run(make, [knob], windows=3, dtype=torch.float32)
    want = difference(make, knob, lambda step: base, 2 * T)
    assert slope(records[-1]) == pytest.approx(want, rel=5e-3)


def test_momentum_is_followed_in_half_precision_too() -> None:
    def make(model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=20 * RATE, momentum=0.8)

    def exact(model: Any, batch: float) -> Tensor:
        return batch * (TARGET @ (model.w - 3.0 * model.other).double())

    knob = held(hdet.Momentum).replace(evidence=Recursion(width=3.0, reach=1.0))
    _, (record,) = run(make, [knob], dtype=torch.bfloat16, probe=exact)
    assert slope(record) == pytest.approx(difference(make, knob, lambda step: 0.8, 0), rel=0.1)


def test_several_knobs_share_a_window() -> None:
    make = ADAMS["adamw"]
    both = [held(hdet.Beta1), held(hdet.Beta2)]
    _, (record,) = run(make, both)
    for knob in both:
        _, (alone,) = run(make, [knob])
        assert record.estimates[knob.label] == alone.estimates[knob.label]


@pytest.mark.parametrize("kind", [hdet.Momentum, hdet.Beta1, hdet.Beta2])
@pytest.mark.parametrize("thawed", [False, True])
def test_what_is_frozen_or_thawed_later_is_followed_as_it_is_trained(kind: type[hdet.Knob], thawed: bool) -> None:
    """In mid-window where a layer is frozen; from the next window on where it is thawed."""
    make = SGDS["momentum"] if kind is hdet.Momentum else ADAMS["adamw"]
    changes_at = T - 1 if thawed else T + T // 2

    def loss(model: Any, step: int) -> Tensor:
        model.other.requires_grad_((step >= changes_at) == thawed)
        return noisy(model, step)

    def first(model: nn.Module) -> Optimizer:
        model.other.requires_grad_(not thawed)  # type: ignore[union-attr]
        return make(model)

    knob = held(kind)
    model = Vector()
    base = knob.bind(model, make(model)).read()
    want = difference(first, knob, lambda step: base, T, loss)
    _, records = run(first, [knob], windows=2, loss=loss)
    assert abs(want) > 1e-4
    assert slope(records[1]) == pytest.approx(want, rel=1e-5)


def test_a_placebo_has_no_slope() -> None:
    """The probe does not read `other`, which alone is followed."""

    def make(model: Any) -> Optimizer:
        return AdamW([{"params": [model.w]}, {"params": [model.other], "name": "other"}], lr=RATE)

    def deaf(model: Any, batch: float) -> Tensor:
        return batch * (TARGET @ model.w)

    _, records = run(make, [held(hdet.Beta1, groups="other"), held(hdet.Beta2, groups="other")], windows=3, probe=deaf)
    for record in records:
        for estimate in record.estimates.values():
            assert (estimate["slope"], estimate["t"]) == (0.0, 0.0)


@pytest.mark.filterwarnings("ignore:the probe is too small")
@pytest.mark.parametrize("kind", [hdet.Momentum, hdet.Beta1, hdet.Beta2])
def test_a_probe_of_noise_proves_nothing(kind: type[hdet.Knob]) -> None:
    """Of 60 windows about one in a hundred passes |t| = 3.5, with the 7 degrees of freedom of 8 sub-batches."""
    make = SGDS["momentum"] if kind is hdet.Momentum else ADAMS["adamw"]
    draws = iter(range(1 << 30))

    def noise(model: Any, batch: float) -> Tensor:
        seed = 8 * (window[0] + 1) + int(batch)
        return torch.randn(3, generator=torch.Generator().manual_seed(seed)).double() @ model.w

    window = [0]

    def counted(model: Any, step: int) -> Tensor:
        window[0] = next(draws) // T
        return noisy(model, step)

    _, records = run(make, [held(kind)], windows=60, loss=counted, probe=noise, batches=range(8))
    ts = sorted(abs(next(iter(record.estimates.values()))["t"]) for record in records)
    assert len(set(ts)) == 60
    assert ts[30] < 1.3
    assert sum(t > 3.5 for t in ts) <= 4


def test_the_error_is_that_of_the_sub_batches() -> None:
    scales = torch.tensor([1.0, 1.3, 0.7, 1.2], dtype=torch.float64)
    _, (one,) = run(SGDS["momentum"], [held(hdet.Momentum)])
    _, (record,) = run(SGDS["momentum"], [held(hdet.Momentum)], batches=scales.tolist())
    each = scales * slope(one)
    estimate = record.estimates["momentum"]
    assert estimate["slope"] == pytest.approx(float(each.mean()), rel=1e-6)
    assert estimate["stderr"] == pytest.approx(float(each.std()) / 2, rel=1e-6)


@pytest.mark.parametrize(("width", "reach"), [(0.01, 0.1), (3.0, 0.1), (3.0, 0.02)])
def test_the_probe_is_read_no_further_than_reach(width: float, reach: float) -> None:
    seen: list[Tensor] = []

    def watched(model: Any, batch: float) -> Tensor:
        seen.append(torch.cat([model.w, model.other]).detach().clone())
        return read_out(model, batch)

    knob = held(hdet.Momentum).replace(evidence=Recursion(width=width, points=(-1.0, 0.0, 1.0), reach=reach))

    def make(model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=20 * RATE, momentum=0.95)

    engine, (record,) = run(make, [knob], probe=watched)
    model: Any = engine.replicas[0].model
    last = torch.cat([model.w, model.other]).detach()
    far = max(float((point - last).norm()) for point in seen)
    _, (narrow,) = run(make, [held(hdet.Momentum)])
    assert slope(record) == pytest.approx(slope(narrow), rel=1e-6)
    assert any(torch.equal(point, last) for point in seen)
    if width == 0.01:
        assert 0.0 < far < 0.9 * reach * float(last.norm())
    else:
        assert far == pytest.approx(reach * float(last.norm()), rel=1e-6)


def test_before_the_weights_move_nothing_is_said() -> None:
    def still(model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.0, momentum=0.8)

    _, (record,) = run(still, [held(hdet.Momentum)])
    assert record.estimates["momentum"]["stderr"] == math.inf


@pytest.mark.parametrize("n", [1, 3])
def test_copies_agree_with_one_model(n: int) -> None:
    _, one = run(ADAMS["adamw"], [held(hdet.Beta1)], windows=2)
    _, many = run(ADAMS["adamw"], [held(hdet.Beta1)], windows=2, replicas=lambda m, o: hdet.replicate(m, o, n=n))
    assert slope(many[-1]) == pytest.approx(slope(one[-1]), rel=1e-9)


def test_where_replicas_come_apart_the_direction_is_their_mean() -> None:
    """Their rates differ here, and D is in proportion to the rate, so that its mean is that of the mean rate."""
    rate = hdet.LearningRate(
        evidence=hdet.evidence.Divergent(), controller=Hold(), space=Linear(RATE), spread=TwoLevel(0.5)
    )
    knob = hdet.Momentum(evidence=Recursion(), controller=Hold())  # far enough for a mean in float32
    looked, (apart,) = run(SGDS["momentum"], [knob, rate], replicas=lambda m, o: hdet.replicate(m, o, n=2))
    assert len(set(apart.values["learning_rate"])) == 2
    _, (one,) = run(SGDS["momentum"], [knob])
    assert apart.estimates["momentum"]["slope"] == pytest.approx(slope(one), rel=1e-4)
    plain, _ = run(SGDS["momentum"], [rate], replicas=lambda m, o: hdet.replicate(m, o, n=2))
    assert torch.equal(looked.replicas[0].model.w, plain.replicas[0].model.w), "each has its own weights back"


@pytest.mark.parametrize("make", [SGDS["nesterov"], ADAMS["adamw"]])
def test_training_is_left_as_it_was(make: Make) -> None:
    model = Vector()
    optimizer = make(model)
    for step in range(T):
        noisy(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    kinds = (hdet.Momentum,) if isinstance(optimizer, SGD) else (hdet.Beta1, hdet.Beta2)
    engine, _ = run(make, [held(kind) for kind in kinds])
    assert torch.equal(engine.replicas[0].model.w, model.w)
    assert torch.equal(engine.replicas[0].model.other, model.other)
    state = engine.optimizers[0].state
    for own, parameter in zip(engine.replicas[0].model.parameters(), model.parameters(), strict=True):
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(state[own][key], value)


@pytest.mark.parametrize("make", [SGDS["nesterov"], ADAMS["adamw"], ADAMS["fused"]])
def test_a_resume_in_mid_window_is_the_same_run(make: Make) -> None:
    kinds = (hdet.Momentum,) if isinstance(make(Vector()), SGD) else (hdet.Beta1, hdet.Beta2)

    def engine() -> Engine:
        model = Vector()
        return Engine(
            hdet.micro_batches(model, make(model), n=1),
            [kind(evidence=Recursion()) for kind in kinds],
            window=T,
            signal=Probe(read_out, (1.0, 1.2, 0.9)),
            total_steps=3 * T,
        )

    whole, first, second = engine(), engine(), engine()
    records = train(whole, 3 * T)
    train(first, T + 5)
    stored = io.BytesIO()
    torch.save(first.state_dict(), stored)
    train(first, T + 8)  # what was saved is a copy
    stored.seek(0)
    second.load_state_dict(torch.load(stored, weights_only=True))
    resumed = train(second, 3 * T)
    assert [record.estimates for record in resumed] == [record.estimates for record in records[1:]]
    assert [record.moves for record in resumed] == [record.moves for record in records[1:]]
    assert all(resumed[0].moves.values())
    assert torch.equal(whole.replicas[0].model.w, second.replicas[0].model.w)


CURVES = torch.tensor([0.02, 0.1, 1.0], dtype=torch.float64)


def depth(model: Any, batch: float) -> Tensor:
    """A quadratic that is steep in one direction and flat in another."""
    loss: Tensor = 0.5 * (CURVES * (model.w - 0.01 * batch).square()).sum()
    return loss


@pytest.mark.parametrize(
    ("make", "kind", "noise", "up"),
    [
        (lambda m: SGD(m.parameters(), lr=0.1, momentum=0.1), hdet.Momentum, 0.02, True),
        (lambda m: SGD(m.parameters(), lr=0.1, momentum=0.99), hdet.Momentum, 0.5, False),
        (lambda m: AdamW(m.parameters(), lr=0.3, betas=(0.99, 0.999)), hdet.Beta1, 0.02, False),
    ],
)
def test_a_value_that_is_far_off_moves_the_right_way(make: Make, kind: type[hdet.Knob], noise: float, up: bool) -> None:
    """And ends lower for it than the run that kept the value."""

    def loss(model: Any, step: int) -> Tensor:
        draw = noise * torch.randn(3, generator=torch.Generator().manual_seed(step)).double()
        return depth(model, 0.0) + draw @ model.w + 0.0 * model.other.sum()

    def trained(controller: Controller | None) -> tuple[float, float]:
        knob = kind(controller=controller)
        engine, records = run(make, [knob], windows=30, window=10, loss=loss, probe=depth, batches=(-1.0, 0.0, 1.0))
        assert isinstance(engine.knobs[0].evidence, Recursion)
        levels = [record.estimates[knob.label]["level"] for record in records[-11:-1]]
        return engine.bases[knob.label], sum(levels) / len(levels)

    before, kept = trained(Hold())
    after, moved = trained(None)
    odds = math.log(after / (1 - after)) - math.log(before / (1 - before))
    assert odds > 1.0 if up else odds < -1.0
    assert moved < 0.5 * kept


@pytest.mark.parametrize(
    ("make", "knob", "words"),
    [
        (SGDS["momentum"], hdet.LearningRate(controller=Hold()), "Line for learning rates"),
        (ADAMS["adamw"], hdet.WeightDecay(), "Analytic for weight decay"),
        (ADAMS["adam"], hdet.Momentum(), "no parameter group of Adam has 'momentum'"),
        (lambda m: RMSprop(m.parameters(), momentum=0.9), hdet.Momentum(), r"SGD.*not those of RMSprop"),
        (lambda m: NAdam(m.parameters()), hdet.Beta1(), r"Adam and AdamW.*not those of NAdam"),
        (lambda m: Adam(m.parameters(), amsgrad=True), hdet.Beta2(), "amsgrad=False"),
        (SGDS["momentum"], hdet.Momentum(bounds=(0.0, 0.9)), r"keeps no buffer.*bounds=\(0\.1, 0\.9\)"),
    ],
)
def test_what_it_cannot_follow_is_refused(make: Make, knob: hdet.Knob, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(make, [knob], evidence=Recursion())


@pytest.mark.parametrize(
    ("dtype", "words"),
    [(torch.bfloat16, "bfloat16 is too coarse"), (torch.complex64, "does not follow complex parameters")],
)
def test_means_that_gradients_cannot_be_worked_out_from_are_refused(dtype: torch.dtype, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(ADAMS["adam"], [held(hdet.Beta2)], dtype=dtype)


def test_one_point_gives_no_slope() -> None:
    with pytest.raises(ConfigError, match="2 distinct points"):
        Recursion(points=(1.0, 1.0))
