"""How far the steps of several learning rates go beside the weights: `Estimate.step_ratio`, told by `GroupLines`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import explicit_loop
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW

import hdet
from hdet import Engine, Probe
from hdet.controllers import Hold, Pooled
from hdet.evidence import GroupLines
from hdet.history import WindowRecord
from hdet.overlay.told_schedule import Course, Told
from hdet.schedules import Constant, LinearDecay, Schedule

pytestmark = pytest.mark.filterwarnings("ignore:the probe is too small")

STEPS, WINDOW = 40, 5
EQUAL = (1.0, 1.0, 1.0)


class Net(nn.Module):
    """A matrix, a convolution, a head, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Linear(256, 64)
        self.filters = nn.Conv1d(64, 32, 3, bias=False)
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.matrix(x)).unsqueeze(-1).expand(-1, -1, 3)
        found: Tensor = self.head(torch.relu(self.filters(hidden)).squeeze(-1))
        return found


def loss(model: Any, x: Tensor) -> Tensor:
    return (model(x).float() - x[:, :8].float()).square().mean(dim=1)


def risen(rate: float) -> LinearDecay:
    return LinearDecay(peak=rate, total_steps=STEPS, warmup=0.5)


def train(
    *rates: float,
    make: Callable[[Any], Any] = AdamW,
    lr: float = 1e-3,
    model: nn.Module | None = None,
    courses: Sequence[Schedule | None] | None = None,
    controller: Any = None,
    watch: Callable[[nn.Module, int], None] | None = None,
    authority: float | None = None,
    **options: Any,
) -> list[WindowRecord]:
    """A run in which every matrix has a rate of its own, some times `lr`, and so have the vectors together."""
    model = model or Net()
    parts = [[p] for p in model.parameters() if p.ndim > 1] + [[p for p in model.parameters() if p.ndim == 1]]
    courses = courses or [risen(lr * rate) for rate in (*rates, 1.0)]
    groups = [{"params": own, "lr": lr * rate} for own, rate in zip(parts, (*rates, 1.0), strict=True)]
    knobs: list[hdet.Knob] = [
        hdet.LearningRate(
            name=str(k),
            groups=[k],
            schedule=course,
            evidence=GroupLines(),
            controller=controller or Hold(),
            **({} if authority is None else {"authority": authority}),
        )
        for k, course in enumerate(courses)
    ]
    dtype = next(model.parameters()).dtype
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    engine = Engine(
        hdet.micro_batches(model, make(groups), n=1),
        knobs,
        window=WINDOW,
        signal=Probe(loss, [x[:8], x[8:16]]),
        total_steps=STEPS,
        **options,
    )
    if watch is not None:
        watch(model, 0)
    return explicit_loop.train(
        engine,
        loss=lambda model, step, index: loss(model, x[16:]).mean(),
        stepped=lambda step: watch(model, step + 1) if watch is not None else None,
    )


def ratios(records: list[WindowRecord], window: int = 0) -> list[float | None]:
    return [estimate["step_ratio"] for estimate in records[window].estimates.values()]


def of_matrices(records: list[WindowRecord]) -> list[float]:
    *found, vectors = ratios(records)
    assert vectors is None
    assert all(one is not None for one in found)
    return [one for one in found if one is not None]


def over_their_mean(sizes: Sequence[float]) -> list[float]:
    return [size / math.prod(sizes) ** (1 / len(sizes)) for size in sizes]


@pytest.mark.parametrize(("make", "lr"), [(AdamW, 1e-3), (SGD, 0.1)], ids=["AdamW", "SGD"])
def test_it_is_the_updates_spectral_norm_beside_that_of_the_weights(make: Any, lr: float) -> None:
    """Against singular values, of which the library takes norms that are about as large."""
    held: dict[int, list[Tensor]] = {}

    def watch(model: nn.Module, step: int) -> None:
        held[step] = [p.detach().flatten(1).clone() for p in model.parameters() if p.ndim > 1]

    found = of_matrices(train(1.0, 2.0, 2.0, make=make, lr=lr, watch=watch))
    ends = list(zip(held[0], held[WINDOW], strict=True))
    spectral = [float(torch.linalg.matrix_norm(b - a, 2) / torch.linalg.matrix_norm(a, 2)) for a, b in ends]
    assert found == pytest.approx(over_their_mean(spectral), rel=0.35)
    by_hand = [
        float((b - a).norm() / (a.square().mean().sqrt() * (math.sqrt(a.shape[0]) + math.sqrt(a.shape[1]))))
        for a, b in ends
    ]
    assert found == pytest.approx(over_their_mean(by_hand), rel=1e-4)  # all schedules have the same form


def test_it_is_told_in_the_first_window_alone() -> None:
    records = train(*EQUAL)
    assert records[0].estimates["0"]["excess"] is not None
    assert set(ratios(records, 1)) == {None}


@pytest.mark.parametrize("make", [AdamW, SGD, Adafactor])
def test_it_grows_with_the_groups_rate(make: Any) -> None:
    one, other = of_matrices(train(*EQUAL, make=make)), of_matrices(train(1.0, 4.0, 1.0, make=make))
    assert (other[1] / other[0]) / (one[1] / one[0]) == pytest.approx(4.0, rel=0.1)
    assert other[2] / other[0] == pytest.approx(one[2] / one[0], rel=0.1)


def test_schedules_of_another_form_are_compared_at_their_peaks() -> None:
    late = LinearDecay(peak=1e-3, total_steps=STEPS, warmup=0.9)
    courses = [risen(1e-3), late, risen(1e-3), risen(1e-3)]
    assert of_matrices(train(*EQUAL, courses=courses)) == pytest.approx(of_matrices(train(*EQUAL)), rel=0.1)


@pytest.mark.parametrize("course", [Constant(1e-3), LinearDecay(1e-3, total_steps=STEPS, warmup=0.0)], ids=str)
def test_no_warm_up_is_needed(course: Schedule) -> None:
    assert of_matrices(train(*EQUAL, courses=[course] * 4)) == pytest.approx(of_matrices(train(*EQUAL)), rel=0.2)


def test_a_rate_whose_peak_nobody_knows_is_compared_with_none() -> None:
    """What is written into the optimizer may rise in one group and not in another."""
    followed = Told(Course([1e-3]), 0, None)
    first, filters, head, _ = ratios(train(*EQUAL, courses=[risen(1e-3), followed, risen(1e-3), risen(1e-3)]))
    assert filters is None
    assert first is not None
    assert head is not None
    assert first * head == pytest.approx(1.0)


def test_an_odd_group_counts_as_ten_times_off_in_the_mean() -> None:
    """By how far it is off beyond that no other group moves."""
    fine: dict[str, Any] = {"make": SGD, "lr": 1e-6}
    first, _, head = map(math.log, of_matrices(train(*EQUAL, model=Net().double(), **fine)))
    low, high = sorted([first, head])
    mean = high + (math.log(10.0) + low - high) / 3
    for rate in (1e3, 1e5):
        moves = train(1.0, rate, 1.0, model=Net().double(), controller=Pooled(common=Hold()), **fine)[0].moves
        assert moves["0"] == pytest.approx(mean - first, abs=0.02)
        assert moves["2"] == pytest.approx(mean - head, abs=0.02)


def test_a_move_that_bounds_cut_off_is_no_overshoot() -> None:
    """The group's own part gives way first: what is left of a raise is not what looking ahead called for."""
    records = train(0.01, 1.0, 1.0, controller=Pooled(), guard=hdet.Rewind(), authority=0.5)
    assert records[0].reasons["0"]["rule"] == "balance"
    assert records[0].moves["0"] == 0.5
    assert records[0].faults == []


def test_where_nothing_moves_none_is_told() -> None:
    model = Net()
    model.filters.weight.register_hook(torch.zeros_like)
    first, filters, head, _ = ratios(train(*EQUAL, model=model, make=SGD))
    assert filters is None
    assert first is not None
    assert head is not None
    assert first * head == pytest.approx(1.0)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 100.0])
def test_a_matrix_whose_scale_is_no_usual_one_does_not_count(scale: float) -> None:
    """As a head that begins at zeros, or a table that is looked up and drawn with 1 for each weight."""
    model = Net()
    with torch.no_grad():
        model.filters.weight.mul_(scale)
    first, filters, head, _ = ratios(train(*EQUAL, model=model))
    assert filters is None
    assert first is not None
    assert head is not None
    assert first * head == pytest.approx(1.0)


def test_a_default_head_of_few_classes_counts() -> None:
    model = Net()
    model.filters = nn.Conv1d(64, 4096, 3, bias=False)
    model.head = nn.Linear(4096, 8)
    assert None not in ratios(train(*EQUAL, model=model))[:3]


def test_in_bfloat16_it_is_told_where_steps_are_not_rounded_away() -> None:
    fine, coarse = (of_matrices(train(*EQUAL, model=net, lr=5e-2)) for net in (Net(), Net().bfloat16()))
    assert coarse == pytest.approx(fine, rel=0.1)
    assert set(ratios(train(*EQUAL, model=Net().bfloat16(), lr=1e-4))) == {None}


def test_what_has_no_gradient_yet_is_no_rate_that_is_too_low() -> None:
    """A layer behind one that begins at zeros: by SGD it moves as little as that lets through."""
    model = Net()
    model.filters.weight.register_hook(lambda gradient: 1e-4 * gradient)
    first, filters, head, _ = ratios(train(*EQUAL, model=model, make=SGD))
    assert filters is None
    assert first is not None
    assert head is not None
    assert first * head == pytest.approx(1.0)


@pytest.mark.parametrize("make", [AdamW, SGD])
def test_a_rate_that_is_a_thousand_times_too_low_is_told(make: Any) -> None:
    """It moves as far as the others for what it is: not as what has no gradient."""
    fine: dict[str, Any] = {"make": make, "lr": 1e-4}
    usual, low = (of_matrices(train(1.0, rate, 1.0, model=Net().double(), **fine)) for rate in (1.0, 1e-3))
    assert (low[1] / low[0]) / (usual[1] / usual[0]) == pytest.approx(1e-3, rel=0.1)


@pytest.mark.parametrize("local", [False, True])
def test_where_replicas_come_apart_none_is_told(local: bool) -> None:
    model = Net()
    optimizer = AdamW([{"params": [p], "lr": 1e-3} for p in model.parameters() if p.ndim > 1])
    knobs: list[hdet.Knob] = [
        hdet.LearningRate(name=str(k), groups=[k], schedule=risen(1e-3), evidence=GroupLines(), controller=Hold())
        for k in range(3)
    ]
    x = torch.randn(16, 256)
    engine = Engine(
        hdet.replicate(model, optimizer, n=2),
        knobs,
        window=WINDOW,
        signal=Probe(loss, [x[:8], x[8:]]),
        gradients="local" if local else "shared",
        total_steps=STEPS,
    )
    first, *_ = explicit_loop.train(engine, WINDOW, loss=lambda model, step, index: loss(model, x).mean())
    assert (ratios([first])[0] is None) == local


def test_a_large_matrix_is_gone_through_in_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = of_matrices(train(*EQUAL))
    monkeypatch.setattr("hdet.replicas.tensors.STRETCH", 1000)
    assert of_matrices(train(*EQUAL)) == pytest.approx(whole, rel=1e-6)


def test_an_anchor_in_host_memory_tells_the_same() -> None:
    assert ratios(train(*EQUAL, anchor="host")) == ratios(train(*EQUAL))


@pytest.mark.parametrize(("make", "lr"), [(AdamW, 1e-3), (SGD, 1e-2)], ids=["AdamW", "SGD"])
def test_balanced_groups_take_equal_steps_whatever_their_rates_were(make: Any, lr: float) -> None:
    """Up to what all have in common: the middle one stays."""
    equal, wrong = (
        np.array(list(train(*rates, make=make, lr=lr, controller=Pooled(common=Hold()))[1].bases.values()))
        for rates in (EQUAL, (2.0, 0.5, 1.0))
    )
    assert wrong[:3] / wrong[0] == pytest.approx(equal[:3] / equal[0], rel=0.1)


def test_the_guard_does_not_take_a_groups_own_move_for_first_steps_that_were_too_large() -> None:
    records = train(1.0, 1.0, 50.0, controller=Pooled(), guard=hdet.Rewind())
    assert records[0].estimates["2"]["offset"] > 0.0
    assert records[0].moves["2"] < -math.log(4.0)
    assert records[0].faults == []
