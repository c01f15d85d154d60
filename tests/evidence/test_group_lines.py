"""Evidence on several learning rates at once: each group's slope against the line along its own update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import explicit_loop
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

import hdet
from hdet import Engine, Probe
from hdet.controllers import Calibrate, Hold, Pooled
from hdet.engine.preview import preview
from hdet.errors import ConfigError
from hdet.evidence import GroupLines, Line
from hdet.evidence.group_lines import among_the_others
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


def all_losses(model: Any, batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.stack([one_loss(model, batch) for batch in batches])


HELD_OUT = [batch(100 + number) for number in range(J)]
ONE_BY_ONE = Probe(one_loss, HELD_OUT)
AT_ONCE = Probe(all_losses, [HELD_OUT])


def knobs(evidence: GroupLines | None = None, names: Sequence[str] = NAMES, **options: Any) -> list[hdet.Knob]:
    options = {"controller": Hold(), **options}
    return [hdet.LearningRate(groups=name, evidence=evidence or GroupLines(), **options) for name in names]


class Watched:
    """An engine on a small net that keeps the weights of every step, the first included."""

    def __init__(
        self,
        explored: Sequence[hdet.Knob],
        *,
        probe: Probe = ONE_BY_ONE,
        steps: int = T,
        optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
        n: int = 1,
        **options: Any,
    ) -> None:
        self.model = net()
        built = optimizer(groups(self.model), **options)
        self.weights = [self._weights()]
        self.engine = Engine(
            hdet.micro_batches(self.model, built, n=n), explored, window=T, signal=probe, total_steps=steps
        )
        self.records = explicit_loop.train(
            self.engine,
            loss=lambda model, step, index: one_loss(model, batch(step)),
            stepped=lambda step: self.weights.append(self._weights()),
        )

    def _weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def loss_at(self, sub_batch: int, stretched: Sequence[float]) -> float:
        """A sub-batch's loss where each group has gone some times its way to the first window's averaged weights."""
        start = self.weights[0]
        averaged = [torch.stack(held).mean(0) for held in zip(*self.weights[1 : T + 1], strict=True)]
        again = net()
        factors = [stretched[group] for group in (0, 2, 1, 2)]
        with torch.no_grad():
            for parameter, begin, end, factor in zip(again.parameters(), start, averaged, factors, strict=True):
                parameter.copy_(begin + factor * (end - begin))
            return float(one_loss(again, HELD_OUT[sub_batch]))

    def slopes(self, away: float) -> NDArray[np.float64]:
        """[J, K] slopes in each group's stretch, about where all groups have gone `away` times, by differences."""
        h = 1e-5

        def difference(k: int, j: int) -> float:
            up, down = ([away + side * h * (k == other) for other in range(len(NAMES))] for side in (1, -1))
            return (self.loss_at(j, up) - self.loss_at(j, down)) / (2 * h)

        return np.array([[difference(k, j) for k in range(len(NAMES))] for j in range(J)])


def relative(record: hdet.history.WindowRecord) -> list[dict[str, Any]]:
    return [record.estimates[f"learning_rate[{name}]"]["relative"] for name in NAMES]


@pytest.mark.parametrize("probe", [ONE_BY_ONE, AT_ONCE], ids=["one by one", "at once"])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"optimizer": torch.optim.AdamW}], ids=str)
def test_slopes_are_those_of_each_groups_line(probe: Probe, options: dict[str, Any]) -> None:
    """One gradient gives what a probe on either side of every group's line would."""
    watched = Watched(knobs(), probe=probe, **options)
    wanted = among_the_others(watched.slopes(away=0.0).mean(axis=0), watched.slopes(away=1.0))
    for found, one in zip(relative(watched.records[0]), wanted, strict=True):
        assert found["slopes"] == pytest.approx(one.slopes, rel=1e-6, abs=1e-9)
        assert found["stderr"] == pytest.approx(one.stderr, rel=1e-6, abs=1e-9)
        assert found["curvature"] == pytest.approx(one.curvature, rel=1e-6)


def test_slopes_on_a_quadratic_are_exact() -> None:
    """Under loss (w - 1)^2 / 2 plain SGD goes 1 - (1 - r)^t of the way: both slopes are known by hand."""
    rates, steps = (0.4, 0.01), 5
    weights = nn.ParameterList([nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in rates])
    model = nn.Module()
    model.weights = weights
    optimizer = torch.optim.SGD([{"params": [w], "lr": r, "name": f"{r}"} for w, r in zip(weights, rates, strict=True)])

    def loss(model: Any, scale: float = 1.0) -> Tensor:
        total: Tensor = sum(0.5 * (w - 1.0).square() for w in model.weights) * scale
        return total

    engine = Engine(
        hdet.micro_batches(model, optimizer, n=1),
        [hdet.LearningRate(groups=f"{r}", evidence=GroupLines(), controller=Hold()) for r in rates],
        window=steps,
        signal=Probe(loss, [0.5, 1.5]),
        total_steps=steps,
    )
    (record,) = explicit_loop.train(engine, loss=lambda model, step, index: loss(model))
    averaged = np.array([np.mean([1 - (1 - r) ** t for t in range(1, steps + 1)]) for r in rates])
    gains, slopes = -averaged, (averaged - 1.0) * averaged
    for r, one in zip(rates, among_the_others(gains, np.stack([0.5 * slopes, 1.5 * slopes])), strict=True):
        assert record.estimates[f"learning_rate[{r}]"]["relative"]["slopes"] == pytest.approx(one.slopes, abs=1e-12)


def test_what_is_common_is_the_line_of_all_groups() -> None:
    """Word for word the estimate that one knob on all groups is given."""
    several = Watched(knobs(), steps=3 * T).records
    one = Watched([hdet.LearningRate(evidence=Line(), controller=Hold())], steps=3 * T).records
    for record, other in zip(several, one, strict=True):
        for name in NAMES:
            told = dict(record.estimates[f"learning_rate[{name}]"])
            told.pop("relative")
            assert told == other.estimates["learning_rate"]


def test_a_group_that_is_left_out_is_neither_moved_nor_compared() -> None:
    (record,) = Watched(knobs(names=NAMES[:2])).records
    shares = [record.estimates[f"learning_rate[{name}]"]["relative"]["curvature"] for name in NAMES[:2]]
    assert sum(shares) == pytest.approx(1.0)


def test_nothing_is_read_of_groups_while_the_peak_is_looked_ahead_to() -> None:
    course = LinearDecay(0.1, total_steps=10 * T, warmup=0.9)
    first, *_, last = Watched(knobs(schedule=course), steps=10 * T).records
    assert first.estimates["learning_rate[first]"]["offset"] > 0
    assert math.isinf(relative(first)[0]["stderr"])
    assert math.isfinite(relative(last)[0]["stderr"])


@pytest.mark.filterwarnings("ignore:the probe is too small")
def test_nothing_is_passed_through_the_model_for_a_rule_that_does_not_listen() -> None:
    passes = []

    def counted(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        passes.append(torch.is_grad_enabled())
        return one_loss(model, batch)

    watched = Watched(knobs(controller=Pooled()), probe=Probe(counted, HELD_OUT), steps=20 * T)
    by_window = [record.estimates["learning_rate[first]"]["stderr"] for record in watched.records]
    heard = sum(map(math.isfinite, by_window))
    assert heard == 17 - 1  # until .85 of the run
    assert sum(passes) == heard * 2 * J  # with a gradient: at both ends of the update


def test_a_window_that_gained_nothing_teaches_nothing() -> None:
    for gains in ([1.0, 1.0], [-1.0, 2.0], [math.nan, -1.0]):
        assert not any(one.known for one in among_the_others(np.array(gains), np.zeros((2, 2))))
    one, other = among_the_others(np.array([-2.0, 1.0]), np.array([[0.1, 0.0], [0.3, 0.1]]))
    assert one.known
    assert not other.known


def test_slopes_that_all_share_are_nobodys_own() -> None:
    """A share of its gain that is the same in every group calls for no change of ratios."""
    gains = np.array([-4.0, -1.0, -0.1])
    for one in among_the_others(gains, np.array([[0.5], [0.7]]) * gains):
        assert one.slope == pytest.approx(0.0, abs=1e-15)


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
    records = Watched(unlike, steps=10 * T).records
    assert all(math.isfinite(record.estimates["learning_rate[second]"]["stderr"]) for record in records[:-1])


def test_a_preview_shows_how_far_the_common_line_reaches() -> None:
    model = net()
    optimizer = torch.optim.SGD(groups(model))
    engine = Engine(hdet.micro_batches(model, optimizer, n=1), knobs(), window=T, signal=ONE_BY_ONE, total_steps=T)
    planned = preview(engine).knobs["learning_rate[first]"]
    assert planned.high[0] == pytest.approx(planned.bases[0] * math.exp(Line().width))
