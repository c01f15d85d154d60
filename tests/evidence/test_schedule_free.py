"""Evidence under Schedule-Free optimizers reads x, the average that they evaluate, and knows how z came by it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import schedulefree
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import hdet
from hdet import Engine
from hdet.controllers import Hold
from hdet.errors import ConfigError
from hdet.recipes.footprint import footprint
from hdet.replicas.anchor import Anchor
from hdet.schedules import Constant
from hdet.spreads import TwoLevel

T, RATE = 6, 0.05
SLOPE = torch.tensor([1.0, -2.0, 0.5])
MAKES: dict[str, Any] = {
    "sgd": lambda p: schedulefree.SGDScheduleFree(p, lr=RATE, weight_lr_power=0.0),
    "adamw": lambda p: schedulefree.AdamWScheduleFree(p, lr=RATE, weight_lr_power=0.0),
    "radam": lambda p: schedulefree.RAdamScheduleFree(p, lr=RATE, weight_lr_power=0.0),
    "wrapped": lambda p: schedulefree.ScheduleFreeWrapper(torch.optim.SGD(p, lr=RATE), weight_lr_power=0.0),
}


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([3.0, 1.0, -2.0]))


def slanted(model: Any, batch: float = 1.0) -> Tensor:
    """Its gradient is the same everywhere, so that every optimizer's updates are in proportion to its rate."""
    loss: Tensor = batch * (SLOPE @ model.w)
    return loss


def step(model: nn.Module, optimizer: Optimizer) -> Tensor:
    loss = slanted(model)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def at_work(make: Any, knobs: list[hdet.Knob], n: int = 1, **options: Any) -> tuple[Engine, Any]:
    model = Vector()
    optimizer = make(model.parameters())
    optimizer.train()
    home = hdet.micro_batches(model, optimizer, n=1) if n == 1 else hdet.replicate(model, optimizer, n=n)
    return Engine(home, knobs, window=T, signal=hdet.Probe(slanted, (1.0, 1.0)), **options), optimizer


def line(**options: Any) -> hdet.LearningRate:
    return hdet.LearningRate(
        schedule=Constant(RATE), evidence=hdet.evidence.Line(read_average_above=None), controller=Hold(), **options
    )


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES.keys())
def test_the_line_is_what_another_rate_in_this_window_would_have_evaluated(make: Any) -> None:
    """z moves in proportion to the rate; x goes on towards where z was, whatever the rate is now."""
    engine, optimizer = at_work(make, [line()])
    model: Any = engine.replicas[0].model
    width, records, losses = hdet.evidence.Line().width, [], {}
    for number in range(3 * T):
        if number == 2 * T:  # the third window opens: make it at other rates too
            for sign in (-1.0, 1.0):
                other, other_model = copy.deepcopy((optimizer, model))
                other.param_groups[0]["params"] = list(other_model.parameters())
                other.param_groups[0]["lr"] *= math.exp(sign * width)
                for _ in range(T):
                    step(other_model, other)
                other.eval()
                losses[sign] = float(slanted(other_model).detach())
        with engine.replicas[0]:
            loss = step(model, optimizer)
        record = engine.step(loss)
        records += [record] if record else []
    told = records[2].estimates["learning_rate"]
    expected = (losses[1.0] - losses[-1.0]) / (2.0 * width)
    assert told["slope"] == pytest.approx(expected, rel=1e-4)
    assert told["averaged"]["slope"] == told["slope"]  # x is an average already


def test_the_pull_of_decay_is_read_at_the_weights_it_evaluates() -> None:
    """Along -(1 - exp(-lr decay T)) x, with nothing taken off or put on for beta."""
    decay, seen = 0.1, []

    def loss(model: Any, batch: float) -> Tensor:
        seen.append(model.w.detach().clone())
        return slanted(model, batch)

    model = Vector()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=RATE, weight_decay=decay)
    optimizer.train()
    knob = hdet.WeightDecay(evidence=hdet.evidence.Analytic(), controller=Hold())
    home = hdet.micro_batches(model, optimizer, n=1)
    engine = Engine(home, [knob], window=T, signal=hdet.Probe(loss, (1.0, 1.0)))
    for _ in range(T):
        with engine.replicas[0]:
            own = step(model, optimizer)
        engine.step(own)
    optimizer.eval()
    x, moved = model.w.detach(), math.expm1(-T * RATE * decay)
    below, above = seen[0], seen[2]
    assert torch.allclose((below + above) / 2, x, atol=1e-6)
    assert torch.allclose((above - below) / 2, moved * x, atol=1e-6)


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES.keys())
def test_held_still_it_is_the_plain_optimizer_bit_for_bit(make: Any, assert_same: Any) -> None:
    engine, optimizer = at_work(make, [line(spread=TwoLevel(0.0))])
    model: Any = engine.replicas[0].model
    plain_model = Vector()
    plain = make(plain_model.parameters())
    plain.train()
    for _ in range(3 * T):
        with engine.replicas[0]:
            loss = step(model, optimizer)
        engine.step(loss)
        step(plain_model, plain)
    assert_same(model.state_dict(), plain_model.state_dict())
    assert_same(optimizer.state_dict()["state"], plain.state_dict()["state"])


@pytest.mark.parametrize("outer", [None, 0.5])
def test_a_merge_moves_what_is_trained_stepped_and_evaluated_alike(outer: float | None) -> None:
    """y, z and x become their means; an outer step then moves all three by the same."""
    merge: hdet.merges.Merge = hdet.merges.Mean()
    if outer is not None:
        merge = hdet.merges.Outer(outer, options=(), merge=merge)
    rate = hdet.LearningRate(schedule=Constant(RATE), spread=TwoLevel(0.5))
    engine, _ = at_work(MAKES["sgd"], [rate], n=4, gradients="local", merge=merge)
    model: Any = engine.replicas[0].model
    opened = model.w.detach().clone()
    before: dict[str, Tensor] = {}
    for number in range(T):
        losses = []
        for replica in engine.replicas:
            with replica:
                losses.append(step(replica.model, replica.optimizer))
        if number == T - 1:
            before = sequences(engine)
        engine.step(losses)
    after = sequences(engine)
    for name, values in before.items():
        assert values.std(dim=0).max() > 1e-3
        expected = values.mean(dim=0) + (1.0 - (outer or 1.0)) * (opened - before["y"].mean(dim=0))
        assert torch.allclose(after[name], expected.expand_as(values), atol=1e-6), name


def test_a_merge_that_keeps_the_optimizers_state_is_refused() -> None:
    for merge in (hdet.merges.Mean("keep"), hdet.merges.Outer()):
        with pytest.raises(ConfigError, match="merge with optimizer='average'"):
            at_work(MAKES["wrapped"], [], n=2, merge=merge)


def sequences(engine: Engine) -> dict[str, Tensor]:
    """Each of the three, by replica."""
    rows: dict[str, list[Tensor]] = {"y": [], "z": [], "x": []}
    for replica in engine.replicas:
        model: Any = replica.model
        weights = model.w
        y = weights.detach().clone()
        z = replica.optimizer.state[weights]["z"]
        beta = replica.optimizer.param_groups[0]["momentum"]
        rows["y"].append(y)
        rows["z"].append(z.clone())
        rows["x"].append((y - (1 - beta) * z) / beta)
    return {name: torch.stack(own) for name, own in rows.items()}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES.keys())
def test_an_earlier_point_is_evaluated_with_the_z_of_its_time(make: Any) -> None:
    """As the guard does, when it asks whether the run was better there."""
    model = Vector()
    optimizer = make(model.parameters())
    optimizer.train()
    anchor = Anchor(model, optimizer)

    def steps() -> None:
        for _ in range(T):
            step(model, optimizer)

    steps()
    anchor.take(T)
    optimizer.eval()
    then = model.w.detach().clone()
    optimizer.train()
    steps()
    now = model.w.detach().clone()
    with anchor.evaluated():
        assert torch.allclose(model.w, then, atol=1e-6)
    assert torch.equal(model.w, now)


def test_no_average_is_kept_beside_its_own() -> None:
    engine, optimizer = at_work(MAKES["adamw"], [line()])
    model: Any = engine.replicas[0].model
    for number in range(T):
        with engine.replicas[0]:
            loss = step(model, optimizer)
        if number == T - 1:
            held = [mean.values for mean in engine.cycle.averages.means.values()]
            assert held == [[]]
        engine.step(loss)


def test_a_footprint_foretells_none_either() -> None:
    model = Vector()
    optimizer = MAKES["adamw"](model.parameters())
    optimizer.train()
    found = footprint(model, optimizer, [hdet.LearningRate(), hdet.WeightDecay()])
    assert not any("average" in held.what for held in found.held)
