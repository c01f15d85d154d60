"""The probe along a direction: what holds however the direction is known."""

from __future__ import annotations

import math
from typing import Any

import explicit_loop
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import hdet
from hdet import Engine, Probe
from hdet.controllers import Estimate, Gated, Hold
from hdet.controllers.gated import GatedState
from hdet.replicas import tensors

T, WINDOWS = 5, 4


class Two(nn.Module):
    def __init__(self, start: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((3,), start))
        self.other = nn.Parameter(torch.ones(3))


def read_out(model: Any, batch: float) -> Tensor:
    loss: Tensor = batch * (model.w + model.other).sum()
    return loss


def adamw(model: nn.Module, **options: float) -> Optimizer:
    return AdamW(model.parameters(), weight_decay=0.2, **options)


def sgd(model: nn.Module, **options: float) -> Optimizer:
    return SGD(model.parameters(), momentum=0.9, weight_decay=0.2, **options)


CASES = [
    (adamw, hdet.WeightDecay(evidence=hdet.evidence.Analytic())),
    (adamw, hdet.Beta1(evidence=hdet.evidence.Recursion())),
    (adamw, hdet.Beta2(evidence=hdet.evidence.Recursion())),
    (sgd, hdet.WeightDecay(evidence=hdet.evidence.Analytic())),
    (sgd, hdet.Momentum(evidence=hdet.evidence.Recursion())),
]
IDS = [f"{make.__name__}-{knob.label}" for make, knob in CASES]


def trained(
    model: nn.Module, optimizer: Optimizer, knobs: list[hdet.Knob], still: range = range(0)
) -> tuple[Engine, list[hdet.history.WindowRecord]]:
    """Windows of training; in the `still` ones the rate is 0, so that neither decay nor momentum moves a weight."""
    signal = Probe(read_out, (1.0, 1.3, 0.7))
    engine = Engine(hdet.micro_batches(model, optimizer, n=1), knobs, window=T, signal=signal, total_steps=T * WINDOWS)
    group = optimizer.param_groups[0]
    rate = group["lr"]
    return engine, explicit_loop.train(
        engine,
        loss=lambda model, step, index: 0.01 * model.other.square().sum(),
        before=lambda step: group.update(lr=0.0 if step // T in still else rate),
    )


@pytest.mark.parametrize(("make", "knob"), CASES, ids=IDS)
def test_a_direction_of_zero_teaches_nothing(make: Any, knob: hdet.Knob) -> None:
    model = Two(start=1.0)
    _, records = trained(model, make(model, lr=0.01), [knob.replace(controller=Hold())], still=range(1, 3))
    told = [record.estimates[knob.label] for record in records]
    for number, estimate in enumerate(told):
        if number in (1, 2):
            assert estimate == Estimate.nothing().to_dict()
        else:
            assert math.isfinite(estimate["stderr"])
            assert estimate["slope"] != 0.0


def test_of_a_window_shorter_than_the_stride_the_last_weights_are_read() -> None:
    """The average is the model's own weights then, which the points are written over."""
    told = []
    for stride in (T, T + 1):  # the last step's weights alone, and none
        model = Two(1.0)
        knob = hdet.WeightDecay(evidence=hdet.evidence.Analytic(stride=stride), controller=Hold())
        _, records = trained(model, adamw(model, lr=0.01), [knob])
        told.append([(record.estimates, record.losses) for record in records])
    assert told[0] == told[1]


def test_at_the_origin_there_is_nothing_to_decay_and_other_knobs_are_heard() -> None:
    """D is there, and zero: another kind of nothing than weights that a knob does not move."""
    model = Two(start=0.0)
    optimizer = AdamW([{"params": [model.w], "name": "w"}, {"params": [model.other], "name": "other"}], lr=0.01)
    knobs: list[hdet.Knob] = [
        hdet.WeightDecay(groups=group, name=group, evidence=hdet.evidence.Analytic(), controller=Hold())
        for group in ("w", "other")
    ]
    _, records = trained(model, optimizer, knobs)
    for record in records:
        told = dict.fromkeys(("excess", "own_excess"), 0.0 if record.window == 0 else None)
        assert record.estimates["w"] == {**Estimate.nothing().to_dict(), **told}
        assert record.estimates["other"]["slope"] < 0.0 < record.estimates["other"]["stderr"]


@pytest.mark.parametrize(("make", "knob"), CASES, ids=IDS)
def test_a_large_tensor_is_worked_on_a_stretch_at_a_time(
    make: Any, knob: hdet.Knob, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    for elements in (2, 2**18):
        for name in ("PASSING", "STRETCH"):
            monkeypatch.setattr(tensors, name, elements)
        model = Two(start=1.0)
        _, records = trained(model, make(model, lr=0.01), [knob.replace(controller=Hold())])
        told.append([record.estimates[knob.label]["slope"] for record in records])
    assert told[0] == pytest.approx(told[1], rel=1e-4)


@pytest.mark.parametrize(("make", "knob"), CASES, ids=IDS)
def test_where_nothing_is_learnt_a_controller_that_remembers_stands_still(make: Any, knob: hdet.Knob) -> None:
    """A slope of 0 +- 0 would be one more window, and what earlier ones had gathered would move the base again."""
    model = Two(start=1.0)
    gated = knob.replace(controller=Gated(0.1, gate=0.5, memory=0.9))
    engine, records = trained(model, make(model, lr=0.01), [gated], still=range(1, WINDOWS))
    assert records[0].moves[knob.label] != 0.0
    assert all(record.moves[knob.label] == 0.0 for record in records[1:])
    state = engine.knobs[0].state
    assert isinstance(state, GatedState)
    assert list(state.sums) == records[0].estimates[knob.label]["slopes"]
