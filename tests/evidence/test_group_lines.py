"""Evidence on several learning rates at once: a line that all share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import explicit_loop
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hdet
from hdet import Engine, Probe
from hdet.controllers import Calibrate, Estimate, Hold, Pooled
from hdet.engine.preview import preview
from hdet.errors import ConfigError
from hdet.evidence import GroupLines, Line
from hdet.history import WindowRecord
from hdet.hparams.schedule import LinearDecay

T, J = 6, 4
NAMES = ("first", "second", "biases")


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def groups(model: nn.Sequential, rates: Sequence[float] = (0.1, 0.02, 0.05)) -> list[dict[str, Any]]:
    parts = [[model[0].weight], [model[2].weight], [model[0].bias, model[2].bias]]
    return [{"params": own, "lr": lr, "name": name} for own, lr, name in zip(parts, rates, NAMES, strict=True)]


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(16, 3, generator=generator, dtype=torch.float64)
    return inputs, torch.stack([inputs.sum(1).sin(), inputs[:, 0]], dim=1)


def one_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


HELD_OUT = [batch(100 + number) for number in range(J)]
ONE_BY_ONE = Probe(one_loss, HELD_OUT)


def knobs(evidence: GroupLines | None = None, names: Sequence[str] = NAMES, **options: Any) -> list[hdet.Knob]:
    options = {"controller": Hold(), **options}
    return [hdet.LearningRate(groups=name, evidence=evidence or GroupLines(), **options) for name in names]


def trained(
    explored: Sequence[hdet.Knob],
    *,
    probe: Probe = ONE_BY_ONE,
    steps: int = T,
    kind: Any = torch.optim.SGD,
    equal: bool = False,
) -> list[WindowRecord]:
    model = net()
    own = groups(model, (0.1,) * 3) if equal else groups(model)
    home = hdet.micro_batches(model, kind(own), n=1)
    engine = Engine(home, explored, window=T, signal=probe, total_steps=steps)
    return explicit_loop.train(engine, loss=lambda model, step, index: one_loss(model, batch(step)))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_what_is_common_is_the_line_of_all_groups(kind: Any) -> None:
    """Word for word the estimate that one knob on all groups is given, and whether anything had trained the model."""
    course = LinearDecay(0.1, total_steps=3 * T, warmup=0.5)
    several = trained(knobs(schedule=course), steps=3 * T, kind=kind)
    one = trained(
        [hdet.LearningRate(schedule=course, evidence=Line(), controller=Hold())], steps=3 * T, kind=kind, equal=True
    )
    for number, (record, other) in enumerate(zip(several, one, strict=True)):
        for name in NAMES:
            told = {**record.estimates[f"learning_rate[{name}]"], "step_ratio": None, "rate_ratio": None}
            wanted = other.estimates["learning_rate"]
            assert {**told, "excess": None} == {**wanted, "excess": None}
            assert wanted["excess"] is None or told["excess"] == wanted["excess"]
        assert (wanted["step_size"] is not None) == (kind is torch.optim.AdamW and number < 1)


@pytest.mark.filterwarnings("ignore:the probe is too small")
def test_nothing_is_passed_through_the_model_for_a_rule_that_does_not_listen() -> None:
    passes = []

    def counted(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        passes.append(torch.is_grad_enabled())
        return one_loss(model, batch)

    listening = knobs(controller=Pooled(common=Calibrate(until=0.5)))
    records = trained(listening, probe=Probe(counted, HELD_OUT), steps=20 * T)
    by_window = [math.isfinite(record.estimates["learning_rate[first]"]["stderr"]) for record in records]
    assert by_window == [True] * 9 + [False] * 11
    assert 9 * 2 * J <= len(passes) <= 9 * 6 * J
    assert not any(passes)  # and no gradient is ever asked for


def test_it_takes_learning_rates_alone() -> None:
    model = net()
    optimizer = torch.optim.AdamW(groups(model))
    decay = hdet.WeightDecay(groups="first", evidence=GroupLines())
    with pytest.raises(ConfigError, match="reads learning rates off the update; use Analytic for decay"):
        Engine(hdet.micro_batches(model, optimizer, n=1), [decay], signal=ONE_BY_ONE)


def test_the_guard_hears_of_a_look_ahead() -> None:
    """Until looking ahead is over the first weights are kept, to begin anew from."""
    course = LinearDecay(0.1, total_steps=10 * T, warmup=0.9)
    model = net()
    engine = Engine(
        hdet.micro_batches(model, torch.optim.SGD(groups(model)), n=1),
        knobs(schedule=course),
        window=T,
        signal=ONE_BY_ONE,
        total_steps=10 * T,
        guard=hdet.Rewind(),
    )
    explicit_loop.train(engine, T, loss=lambda model, step, index: one_loss(model, batch(step)))
    assert engine.cycle.watch is not None
    assert engine.cycle.watch.first is not None


@pytest.mark.filterwarnings("ignore:the probe is too small")
def test_the_common_line_is_read_while_any_rule_listens() -> None:
    early, late = Pooled(common=Calibrate(until=0.2)), Pooled(common=Calibrate(until=1.0))
    unlike = [*knobs(names=NAMES[:1], controller=early), *knobs(names=NAMES[1:], controller=late)]
    records = trained(unlike, steps=10 * T)
    assert all(math.isfinite(record.estimates["learning_rate[second]"]["stderr"]) for record in records[:-1])


@pytest.mark.parametrize("wanted", [0, 1, 3])
def test_the_common_lines_curvature_is_measured_if_any_rule_wants_it(wanted: int) -> None:
    class Straight(Hold):
        def wants_curvature(self, slope: Estimate, *, averaged: bool = False) -> bool:
            return False

    unlike = [*knobs(names=NAMES[:wanted]), *knobs(names=NAMES[wanted:], controller=Straight())]
    (record,) = trained(unlike)
    assert [told["curvature"] is not None for told in record.estimates.values()] == [wanted > 0] * 3


def test_a_preview_shows_how_far_the_common_line_reaches() -> None:
    model = net()
    optimizer = torch.optim.SGD(groups(model))
    engine = Engine(hdet.micro_batches(model, optimizer, n=1), knobs(), window=T, signal=ONE_BY_ONE, total_steps=T)
    planned = preview(engine).knobs["learning_rate[first]"]
    assert planned.high[0] == pytest.approx(planned.bases[0] * math.exp(Line().width))
