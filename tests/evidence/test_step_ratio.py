"""How far the steps of several learning rates go beside the weights: `Estimate.step_ratio`, told by `GroupLines`."""

from __future__ import annotations

import copy
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
    again: tuple[float, ...] = GroupLines().again,
    first: float = 1.0,
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
            evidence=GroupLines(again=again, first=first),
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
        **{"total_steps": STEPS, **options},
    )
    if watch is not None:
        watch(model, 0)
    return explicit_loop.train(
        engine,
        STEPS,
        loss=lambda model, step, index: loss(model, x[16:]).mean(),
        stepped=lambda step: watch(model, step + 1) if watch is not None else None,
    )


def ratios(records: list[WindowRecord], window: int = 0) -> list[float | None]:
    return [estimate["step_ratio"] for estimate in records[window].estimates.values()]


def by_rate(records: list[WindowRecord], window: int = 0) -> list[float | None]:
    return [estimate["rate_ratio"] for estimate in records[window].estimates.values()]


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


@pytest.mark.parametrize(("again", "windows"), [((0.1, 0.2), [0, 1]), ((0.2, 0.5), [0, 1, 4]), ((), [0])])
def test_it_is_told_in_the_first_window_and_at_some_shares_of_the_run(
    again: tuple[float, ...], windows: list[int]
) -> None:
    records = train(*EQUAL, again=again)
    told = [None not in ratios(records, k)[:3] for k in range(len(records))]
    assert [k for k in range(len(records)) if told[k]] == windows
    assert [one is not None for one in [by_rate(records, k)[-1] for k in range(len(records))]] == told
    assert all(set(ratios(records, k)) == {None} for k in range(len(records)) if not told[k])
    assert [record.estimates["0"]["excess"] is not None for record in records] == [True] + [False] * 7


def test_in_a_run_of_unknown_length_it_is_told_in_the_first_window_alone() -> None:
    records = train(*EQUAL, courses=[Constant(1e-3)] * 4, total_steps=None)
    assert len(records) > 2
    assert [set(ratios(records, k)) == {None} for k in range(len(records))] == [False] + [True] * (len(records) - 1)


def test_later_it_is_of_that_windows_steps_beside_the_weights_it_began_with() -> None:
    held: dict[int, list[Tensor]] = {}

    def watch(model: nn.Module, step: int) -> None:
        held[step] = [p.detach().flatten(1).clone() for p in model.parameters() if p.ndim > 1]

    records = train(*EQUAL, again=(0.5,), watch=watch)
    by_hand = [
        float((b - a).norm() / (a.square().mean().sqrt() * (math.sqrt(a.shape[0]) + math.sqrt(a.shape[1]))))
        for a, b in zip(held[4 * WINDOW], held[5 * WINDOW], strict=True)
    ]
    assert ratios(records, 4)[:3] == pytest.approx(over_their_mean(by_hand), rel=1e-4)


@pytest.mark.parametrize("rate", [0.1, 7.0])
@pytest.mark.parametrize(("odd", "fine"), [(1.0, False), (1e4, True)])
def test_a_rate_without_a_matrix_goes_where_the_others_go(rate: float, odd: float, fine: bool) -> None:
    """To the mean of the others' rates once they are balanced; one far off counts as ten times off."""
    small: dict[str, Any] = {"make": SGD, "lr": 1e-6, "model": Net().double()} if fine else {}
    courses = [risen(small.get("lr", 1e-3) * one) for one in (2.0, odd, 0.3, rate)]
    found = of_matrices(records := train(2.0, odd, 0.3, courses=courses, **small))
    balanced = [one / far for one, far in zip((2.0, odd, 0.3), found, strict=True)]
    assert by_rate(records)[-1] == pytest.approx(rate / math.prod(balanced) ** (1 / 3))
    assert by_rate(records)[:3] == [None] * 3


def chained(own: Sequence[int]) -> Callable[[Any], Any]:
    """SGD, and AdamW for some groups."""

    def make(groups: list[dict[str, Any]]) -> Any:
        other = [k for k in range(len(groups)) if k not in own]
        return hdet.ChainedOptimizer(SGD([groups[k] for k in other]), AdamW([groups[k] for k in own]))

    return make


def test_vectors_are_compared_with_rates_of_their_own_optimizer() -> None:
    """Those by AdamW with the matrix that AdamW steps, as its rate stands then; with none, they tell nothing."""
    rates = (5.0, 5.0, 0.2, 1.0)
    options: dict[str, Any] = {"courses": [risen(1e-3 * one) for one in rates], "controller": Pooled(common=Hold())}
    records = train(*rates[:3], make=chained([2, 3]), again=(0.5,), **options)
    assert by_rate(records)[-1] == pytest.approx(5.0)
    at_once = list(records[1].bases.values())
    assert at_once[2] != pytest.approx(at_once[3], rel=0.1)  # the matrix has left, by AdamW's steps beside SGD's
    assert by_rate(records, 4)[-1] == pytest.approx(at_once[3] / at_once[2])
    assert by_rate(train(*rates[:3], make=chained([3]), **options))[-1] is None


@pytest.mark.parametrize(
    ("entry", "values", "kept"),
    [("by_muon", (True, False), True), ("algorithm", ("lion", "adam"), True), ("foreach", (True, False), False)],
)
def test_groups_with_other_switches_have_another_scale(entry: str, values: tuple[Any, Any], kept: bool) -> None:
    """As in optimizers that step some groups by Muon and the others by Adam."""

    def switched(groups: list[dict[str, Any]]) -> SGD:
        return SGD([{**group, entry: values[k == 3]} for k, group in enumerate(groups)], lr=0.1)

    assert (by_rate(train(*EQUAL, make=switched, lr=0.1))[-1] is None) == kept


def test_parts_of_a_chain_have_scales_of_their_own_though_they_are_of_one_class() -> None:
    def make(groups: list[dict[str, Any]]) -> Any:
        return hdet.ChainedOptimizer(AdamW(groups[:3]), AdamW(groups[3:]))

    assert by_rate(train(*EQUAL, make=make))[-1] is None


def test_a_group_that_has_been_compared_by_its_steps_keeps_its_place_once_it_is_frozen() -> None:
    model = Net()

    def freeze(_: nn.Module, step: int) -> None:
        if step == WINDOW + 1:
            model.filters.weight.requires_grad_(False)

    records = train(1.0, 30.0, 1.0, model=model, watch=freeze, again=(0.5,), controller=Pooled(common=Hold()))
    assert records[0].moves["1"] < -1.0
    assert [record.moves["1"] for record in records[1:]] == [0.0] * 7


def test_what_is_frozen_from_the_start_keeps_its_rate() -> None:
    model = Net()
    model.filters.weight.requires_grad_(False)
    records = train(1.0, 0.01, 1.0, model=model, controller=Pooled(common=Hold()))
    assert [record.moves["1"] for record in records] == [0.0] * 8
    assert records[0].moves["0"] != 0.0


def test_a_frozen_group_that_the_loop_moves_does_not_count_as_one_whose_rate_does() -> None:
    """A teacher that follows by moving averages, held by the optimizer too."""
    model = Net()
    model.filters.weight.requires_grad_(False)

    def follow(_: nn.Module, step: int) -> None:
        with torch.no_grad():
            model.filters.weight.mul_(1.05)

    still = train(1.0, 0.01, 1.0, model=copy.deepcopy(model), controller=Pooled(common=Hold()))
    moved = train(1.0, 0.01, 1.0, model=model, watch=follow, controller=Pooled(common=Hold()))
    assert moved[0].moves["0"] == pytest.approx(still[0].moves["0"], rel=0.1)
    assert [record.moves["1"] for record in moved] == [0.0] * 8


@pytest.mark.parametrize("part", ["bias", "weight"])
def test_what_is_silent_and_frozen_keeps_its_rate_as_well(part: str) -> None:
    """It may be thawed later."""
    model = Net()
    with torch.no_grad():
        model.filters.weight.mul_(1e-3)
    for name, parameter in model.named_parameters():
        if part in name and (parameter.ndim == 1 or name == "filters.weight"):
            parameter.requires_grad_(False)
    courses = [risen(1e-3), risen(1e-5), risen(1e-3), risen(1e-4)]
    records = train(1.0, 0.01, 1.0, model=model, courses=courses, controller=Pooled(common=Hold()), again=())
    frozen, other = ("3", "1") if part == "bias" else ("1", "3")
    assert records[0].moves[frozen] == 0.0
    assert records[0].moves[other] > 1.0


def test_where_rounding_hides_steps_vectors_do_not_follow_those_that_show() -> None:
    """Which are of the higher rates."""
    records = train(1.0, 10.0, 1.0, model=Net().bfloat16(), lr=1e-3)
    assert ratios(records)[1] is not None
    assert ratios(records)[0] is None
    assert by_rate(records)[-1] is None


def first_window(model: nn.Module, optimizer: Any, groups: dict[str, list[int]], **options: Any) -> WindowRecord:
    """The first window of a run with a rate for some of the optimizer's groups together."""
    knobs: list[hdet.Knob] = [
        hdet.LearningRate(name=name, groups=own, schedule=risen(1e-3), evidence=GroupLines(), controller=Hold())
        for name, own in groups.items()
    ]
    n = options.pop("n", 1)
    home = hdet.replicate(model, optimizer, n=n) if n > 1 else hdet.micro_batches(model, optimizer, n=1)
    x = torch.randn(16, 256)
    signal = Probe(loss, [x[:8], x[8:]])
    engine = Engine(home, knobs, window=WINDOW, signal=signal, total_steps=STEPS, **options)
    return explicit_loop.train(engine, WINDOW, loss=lambda model, step, index: loss(model, x).mean())[0]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("other", "told"), [(1.0 + 1e-7, True), (1.1, False), (30.0, False)])
def test_a_knob_over_groups_of_unlike_rates_has_no_one_rate_to_compare_with(
    first: int, other: float, told: bool
) -> None:
    """Whichever of them comes first; rates that differ by rounding are one."""
    model = Net()
    both = [{"params": [model.matrix.weight], "lr": 1e-3}, {"params": [model.head.weight], "lr": 1e-3 * other}]
    vectors = {"params": [p for p in model.parameters() if p.ndim == 1], "lr": 1e-3}
    optimizer = AdamW([both[first], both[1 - first], vectors])
    record = first_window(model, optimizer, {"matrices": [0, 1], "vectors": [2]})
    assert ratios([record])[0] == pytest.approx(1.0)
    assert [ratio is not None for ratio in by_rate([record])] == [False, told]


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


@pytest.mark.parametrize("begins", [1e-3, 0.0])
def test_a_rate_whose_peak_nobody_knows_is_compared_with_none(begins: float) -> None:
    """What is written into the optimizer may rise in one group and not in another."""
    followed = Told(Course([begins]), 0, None)
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


class InParts(torch.optim.Optimizer):
    """AdamW that shows a group's state by its first parameter, with numbers, as `hdet.deepspeed` does under ZeRO."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {})
        self.inner = AdamW(self.param_groups)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for first, *others in (group["params"] for group in self.param_groups):
            parts = enumerate(self.inner.state.get(own, {}) for own in (first, *others))
            self.state[first] = {f"{key}.{number}": value for number, part in parts for key, value in part.items()}


@pytest.mark.parametrize(
    ("make", "whole"),
    [
        (AdamW, True),
        (InParts, True),
        (lambda groups: SGD(groups, momentum=0.9), False),
        (SGD, False),
        (
            lambda groups: hdet.ChainedOptimizer(SGD(groups[:1], momentum=0.9), AdamW(groups[1:])),
            False,
        ),
    ],
)
def test_a_first_ratio_is_told_in_part_where_steps_grow_with_the_gradient(make: Any, whole: bool) -> None:
    """Plain SGD keeps no state to tell it by, nor do weights that got no gradient, under whatever optimizer."""
    model = Net()
    model.unused = nn.Linear(4, 4)
    told, in_part = (
        train(1.0, 5.0, 1.0, 1.0, make=make, lr=1e-4, again=(0.2,), first=first, model=copy.deepcopy(model))
        for first in (1.0, 0.5)
    )
    for window, share in ((0, 1.0 if whole else 0.5), (1, 1.0)):
        for found in (ratios, by_rate):
            expected = [one and one**share for one in found(told, window)]
            assert found(in_part, window) == pytest.approx(expected)
    assert any(one and not 0.9 < one < 1.1 for one in ratios(told))


def test_what_does_not_move_does_not_count() -> None:
    model = Net()
    model.filters.weight.register_hook(torch.zeros_like)
    first, filters, head, _ = ratios(records := train(*EQUAL, model=model, make=SGD))
    assert filters is None
    assert by_rate(records)[1] is None
    assert first is not None
    assert head is not None
    assert first * head == pytest.approx(1.0)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 100.0])
def test_a_matrix_whose_scale_is_no_usual_one_does_not_count(scale: float) -> None:
    """As a head that begins at zeros, or a table that is looked up and drawn with 1 for each weight."""
    model = Net()
    with torch.no_grad():
        model.filters.weight.mul_(scale)
    first, filters, head, _ = ratios(records := train(*EQUAL, model=model))
    assert filters is None
    assert by_rate(records)[1] == pytest.approx(1.0)
    assert first is not None
    assert head is not None
    assert first * head == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_frozen_numbers_of_eight_bits_do_not_count(dtype: torch.dtype) -> None:
    """As of a quantized layer that the optimizer holds too."""
    model = Net()
    codes = torch.linspace(-100.0, 100.0, 256).reshape(16, 16).to(dtype)
    model.codes = nn.ParameterList([nn.Parameter(codes, requires_grad=False)])
    *compared, told, _ = ratios(train(*EQUAL, 1.0, model=model))
    assert compared == of_matrices(train(*EQUAL))
    assert told is None


def test_a_default_head_of_few_classes_counts() -> None:
    model = Net()
    model.filters = nn.Conv1d(64, 4096, 3, bias=False)
    model.head = nn.Linear(4096, 8)
    assert None not in ratios(train(*EQUAL, model=model))[:3]


def test_in_bfloat16_it_is_told_where_steps_are_not_rounded_away() -> None:
    fine, coarse = (of_matrices(train(*EQUAL, model=net, lr=5e-2)) for net in (Net(), Net().bfloat16()))
    assert coarse == pytest.approx(fine, rel=0.1)
    assert set(ratios(train(*EQUAL, model=Net().bfloat16(), lr=1e-4))) == {None}


@pytest.mark.parametrize(("share", "shows"), [(0.07, False), (0.09, True)])
def test_an_update_shows_from_two_last_digits_a_step_on(share: float, shows: bool) -> None:
    """Of bfloat16, whose last digit is 1 / 128: of all that a matrix holds 0.078 in five steps, however much it is."""
    model = Net().bfloat16()

    def grow(_: nn.Module, step: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 + share if step == WINDOW else 1.0)

    found = ratios(train(*EQUAL, model=model, lr=1e-9, watch=grow, again=()))[:3]
    assert [one is not None for one in found] == [shows] * 3


def test_a_matrix_whose_update_overflows_tells_nothing_and_the_others_are_compared() -> None:
    model = Net()
    model.unused = nn.Linear(64, 64, bias=False)  # so that the losses stay finite

    def explode(_: nn.Module, step: int) -> None:
        with torch.no_grad():
            model.unused.weight.mul_(1e25 if step == WINDOW else 1.0)

    records = train(*EQUAL, 1.0, model=model, watch=explode, controller=Pooled(common=Hold()))
    *compared, exploded, vectors = ratios(records)
    assert compared == [pytest.approx(one, rel=1e-6) for one in of_matrices(train(*EQUAL))]
    assert (exploded, vectors) == (None, None)
    assert (records[0].moves["3"], records[0].moves["4"]) == (0.0, 0.0)


def test_what_has_no_gradient_yet_is_no_rate_that_is_too_low() -> None:
    """A layer behind one that begins at zeros: by SGD it moves as little as that lets through."""
    model = Net()
    model.filters.weight.register_hook(lambda gradient: 1e-4 * gradient)
    first, filters, head, _ = ratios(records := train(*EQUAL, model=model, make=SGD))
    assert filters is None
    assert by_rate(records)[1] is None
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
    groups = {str(k): [k] for k in range(3)}
    record = first_window(model, optimizer, groups, n=2, gradients="local" if local else "shared")
    assert (ratios([record])[0] is None) == local


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
