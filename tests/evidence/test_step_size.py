"""How large a step is beside the weights: `Estimate.step_size`, which `Line` tells."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import explicit_loop
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam

import hdet
from hdet import Engine, Probe
from hdet.controllers import Calibrate, Hold
from hdet.evidence import GroupLines, Line
from hdet.history import WindowRecord
from hdet.schedules import Constant, LinearDecay, Replay, Schedule

PEAK, STEPS, WINDOW = 0.01, 40, 5
RISING = LinearDecay(peak=PEAK, total_steps=STEPS, warmup=0.5)
TARGET = torch.tensor([1.0, -1.0])
X = torch.randn(16, 256, generator=torch.Generator().manual_seed(1)) + 1.0


class Net(nn.Module):
    """A matrix, whose inputs have a mean that all rows see first, a convolution and a vector."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Linear(width, 64)
        self.filters = nn.Conv1d(64, 32, 3, bias=False)
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.matrix(x)).unsqueeze(-1).expand(-1, -1, 3)
        found: Tensor = self.head(self.filters(hidden).squeeze(-1))
        return found


def loss(model: Any, batch: Tensor) -> Tensor:
    return (model(batch) - 3.0 * TARGET).square().mean(dim=1)


def train(
    make: Callable[[Any], Optimizer] = lambda groups: AdamW(groups, lr=PEAK),
    schedule: Schedule = RISING,
    *,
    model: nn.Module | None = None,
    groups: Callable[[Any], Any] = lambda model: model.parameters(),
    knobs: list[hdet.Knob] | None = None,
    controller: Any = None,
    **options: Any,
) -> list[WindowRecord]:
    model = model or Net()
    rate = hdet.LearningRate(schedule=schedule, evidence=Line(), controller=controller or Hold(), **options)
    return explicit_loop.train(engine(model, make(groups(model)), knobs or [rate]), loss=mean_loss)


def engine(model: nn.Module, optimizer: Optimizer, knobs: list[hdet.Knob]) -> Engine:
    replicas = hdet.micro_batches(model, optimizer, n=1)
    return Engine(replicas, knobs, window=WINDOW, signal=Probe(loss, [X[:8], X[8:]]), total_steps=STEPS)


def mean_loss(model: Any, step: int, index: int) -> Tensor:
    return loss(model, X).mean()


def sizes(records: list[WindowRecord], knob: str = "learning_rate") -> list[float | None]:
    return [record.estimates[knob]["step_size"] for record in records]


def spectral(weights: Tensor) -> float:
    return float(torch.linalg.matrix_norm(weights.detach().flatten(1), 2))


def test_it_is_what_a_step_that_changes_all_weights_alike_is_to_random_ones() -> None:
    """Against singular values; the formula takes weights for normal, and these are uniform."""
    model = Net()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    exact = [spectral(torch.full_like(each, PEAK)) / spectral(each) for each in matrices]
    first, *_ = sizes(train(model=model))
    assert first == pytest.approx(sorted(exact)[1], rel=0.15)


def test_it_is_told_while_the_schedule_rises() -> None:
    found = sizes(train())
    assert [size is not None for size in found] == [True] * 4 + [False] * 4


@pytest.mark.parametrize(
    "schedule", [Constant(PEAK), LinearDecay(peak=PEAK, total_steps=STEPS, warmup=0.0)], ids=["constant", "falls"]
)
def test_without_a_warm_up_it_is_not_told(schedule: Schedule) -> None:
    records = train(schedule=schedule)
    assert set(sizes(records)) == {None}
    assert records[0].estimates["learning_rate"]["excess"] is None


@pytest.mark.parametrize("kind", [Adam, Adamax, NAdam, RAdam])
def test_all_of_adams_kind_have_one(kind: Any) -> None:
    found = sizes(train(lambda parameters: kind(parameters, lr=PEAK)))[0]
    assert found == pytest.approx(sizes(train())[0], rel=0.05)


def test_where_steps_follow_from_the_gradient_there_is_none() -> None:
    assert set(sizes(train(lambda parameters: SGD(parameters, lr=PEAK)))) == {None}


def test_vectors_alone_have_none() -> None:
    only = lambda model: [p for p in model.parameters() if p.ndim == 1]  # noqa: E731
    assert set(sizes(train(groups=only))) == {None}


def test_a_matrix_of_one_row_is_a_vector() -> None:
    class Row(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.Parameter(torch.ones(1, 256))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scales)[:, :2]

    assert set(sizes(train(model=Row()))) == {None}


def test_a_group_whose_rate_is_0_does_not_count() -> None:
    alone = sizes(train(groups=lambda model: [model.matrix.weight]))[0]
    apart = lambda model: [  # noqa: E731
        {"params": [model.matrix.weight]},
        {"params": [model.filters.weight, model.head.weight], "lr": 0.0},
    ]
    assert sizes(train(groups=apart))[0] == pytest.approx(alone, rel=0.05)


def test_a_stack_of_matrices_counts_as_one_of_them() -> None:
    """As the experts of a mixture; one matrix [4, 65536] of all of them would have a quarter of that."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.matrices = nn.Parameter(torch.randn(4, 256, 256) / 16)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x @ self.matrices).mean(0)[:, :2]

    spectral_norms = [spectral(each) for each in Experts().matrices]
    (first, *_) = sizes(train(model=Experts()))
    assert first == pytest.approx(4 * PEAK * 256 / sum(spectral_norms), rel=0.1)


def test_a_staircase_rises_too() -> None:
    """One step up in every window, and none at its end."""
    course = [PEAK * (1 + step // (WINDOW - 1)) / 8 for step in range(STEPS)]
    found = sizes(train(schedule=Replay(course)))
    assert None not in found[:3]


def test_it_counts_the_shift_and_the_groups_own_rates() -> None:
    plain = sizes(train())[0]
    assert sizes(train(initial_shift=-0.7))[0] == pytest.approx(plain * 2.718281828**-0.7, rel=0.02)  # type: ignore[operator]
    matrix, filters = (
        sizes(train(groups=lambda model, name=name: [getattr(model, name).weight]))[0] for name in ("matrix", "filters")
    )
    apart = lambda model: [  # noqa: E731
        {"params": [model.matrix.weight], "lr": PEAK},
        {"params": [model.filters.weight], "lr": 3 * PEAK},
    ]
    assert matrix is not None
    assert filters is not None
    assert sizes(train(groups=apart))[0] == pytest.approx((matrix + 3 * filters) / 2, rel=0.05)


def test_groups_that_are_judged_together_share_one() -> None:
    evidence = GroupLines()
    knobs: list[hdet.Knob] = [
        hdet.LearningRate(name=str(k), groups=[k], schedule=RISING, evidence=evidence, controller=Hold())
        for k in range(2)
    ]
    halves = lambda model: [{"params": list(part.parameters())} for part in (model.matrix, model.head)]  # noqa: E731
    record = train(knobs=knobs, groups=halves)[0]
    first, second = (record.estimates[name]["step_size"] for name in ("0", "1"))
    assert first is not None
    assert first == second


def test_a_direction_that_is_soon_used_up_does_not_lower_a_rate_whose_steps_are_small() -> None:
    """All inputs have a mean of 1: a few steps along it bring the output to where it is wanted."""
    rising, cautious = LinearDecay(peak=PEAK, total_steps=STEPS, warmup=0.9), {"initial_shift": -1.386}
    held, kept, lowered = (
        [record.bases["learning_rate"] for record in records[2:6]]
        for records in (
            train(schedule=rising),
            train(schedule=rising, controller=Calibrate(small=100.0), **cautious),
            train(schedule=rising, controller=Calibrate().without("regain", "small_steps"), **cautious),
        )
    )
    assert kept == pytest.approx(held)
    assert max(low / high for low, high in zip(lowered, held, strict=True)) < 0.5


@pytest.mark.filterwarnings("ignore:the probe's loss does not depend on what is trained")  # behind the head's zeros
def test_what_began_at_zeros_does_not_count() -> None:
    """Whatever the rate, its steps are as large as all that it holds."""
    alone = sizes(train(groups=lambda model: [model.matrix.weight]))
    model = Net()
    nn.init.zeros_(model.filters.weight)
    nn.init.zeros_(model.head.weight)
    found = sizes(train(model=model, groups=lambda model: [p for p in model.parameters() if p.ndim > 1]))
    assert found[:4] == pytest.approx(alone[:4], rel=0.25)


@pytest.mark.parametrize("evidence", [Line(), GroupLines()], ids=["line", "group lines"])
def test_a_resumed_run_knows_what_began_at_zeros(evidence: Any) -> None:
    def begun() -> Engine:
        model = Net()
        nn.init.zeros_(model.filters.weight)
        rate = hdet.LearningRate(schedule=RISING, evidence=evidence, controller=Hold())
        return engine(model, AdamW([model.matrix.weight, model.filters.weight], lr=PEAK), [rate])

    first, second = begun(), begun()
    explicit_loop.train(first, WINDOW, loss=mean_loss)
    second.load_state_dict(first.state_dict())
    here, resumed = (explicit_loop.train(one, WINDOW, loss=mean_loss)[-1:] for one in (first, second))
    assert sizes(resumed) == sizes(here)


def test_where_all_began_at_zeros_there_is_none() -> None:
    model = Net()
    nn.init.zeros_(model.filters.weight)
    assert set(sizes(train(model=model, groups=lambda model: [model.filters.weight]))) == {None}


@pytest.mark.parametrize(("decay", "told"), [(0.99, True), (1.01, False)])
def test_where_a_rate_is_a_strong_decay_too_it_says_nothing_of_harm(decay: float, told: bool) -> None:
    """A step takes the share rate * decay of a weight; what lies below 1 % hardly shows."""
    found = sizes(train(lambda groups: AdamW(groups, lr=PEAK, weight_decay=decay), initial_shift=-1.0))[0]
    assert (found is not None) == told


def of_rate(peak: float, shift: float, *, decay: float) -> float | None:
    """The first window's step size, by AdamW, in a warm-up so long that the weights are still the first ones."""
    rising = LinearDecay(peak=peak, total_steps=50 * STEPS, warmup=0.5)
    make = lambda groups: AdamW(groups, lr=peak, weight_decay=decay)  # noqa: E731
    return sizes(train(make, rising, initial_shift=shift))[0]


def test_huge_steps_are_told_whatever_decay_takes() -> None:
    """Of a rate that is far too high decay takes too much by that alone, and nobody meant it."""
    huge = 4.0 * PEAK * 12.0 / (of_rate(PEAK, 0.0, decay=0.0) or 0.0)
    found = of_rate(huge, 0.0, decay=0.1)
    assert found is not None
    assert found > 12.0
    assert found == pytest.approx(of_rate(huge, 0.0, decay=0.0), rel=0.1)
    assert of_rate(2 * PEAK, 0.0, decay=0.0) is not None, "no decay takes nothing, at any rate"
    assert of_rate(huge / 5, 0.0, decay=0.11) is None, "decay takes 1 % and more, and steps are not huge"


def test_beside_a_rate_that_is_far_too_high_decay_counts_by_the_present_one() -> None:
    """So that steps have a size once that rate has been cut back, while decay of a rate that may be meant counts."""
    huge = 2.0 * PEAK * 12.0 / (of_rate(PEAK, 0.0, decay=0.0) or 0.0)
    low = math.log(PEAK / huge)
    assert of_rate(huge, low, decay=0.5) == pytest.approx(of_rate(PEAK, 0.0, decay=0.5), rel=0.1)
    assert of_rate(huge, low, decay=1.5) is None
    assert of_rate(huge / 4, low + math.log(4.0), decay=0.5) is None
