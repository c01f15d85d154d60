"""Recursion evidence on the norm that gradients are clipped to, against runs that were trained again with another one.

Gradients do not depend on the weights here, so that what the recursion leaves out is zero, and training again agrees
up to the error of a central difference.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import hdet
from hdet import ClipNorm, Engine, Probe
from hdet.controllers import Controller, Hold
from hdet.errors import ConfigError
from hdet.evidence import Recursion

T, RATE, NORM, NUDGE = 12, 0.01, 1.2, 1e-5
TARGET = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
BETAS = (0.7, 0.9)

Make = Callable[[nn.Module], Optimizer]


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([3.0, 1.0, 4.0], dtype=torch.float64))
        self.other = nn.Parameter(torch.tensor([3.0, 1.0, 4.0], dtype=torch.float64))


def noisy(model: Any, step: int) -> Tensor:
    """Of about half of the steps the gradient is longer than NORM."""
    noise = torch.randn(3, generator=torch.Generator().manual_seed(step)).double()
    loss: Tensor = (0.2 * TARGET + noise) @ (model.w + 0.3 * model.other)
    return loss


def seldom(model: Any, step: int) -> Tensor:
    """`w` has no gradient in most steps."""
    return noisy(model, step) if step % 5 == 3 else 2.0 * model.other.sum()


def read_out(model: Any, batch: float) -> Tensor:
    """Linear in the weights, so that its slope along D is D's component."""
    loss: Tensor = batch * (TARGET @ (model.w - 3.0 * model.other))
    return loss


MAKES: dict[str, Make] = {
    "plain": lambda m: SGD(m.parameters(), lr=RATE),
    "momentum": lambda m: SGD(m.parameters(), lr=RATE, momentum=0.8),
    "nesterov": lambda m: SGD(m.parameters(), lr=RATE, momentum=0.8, nesterov=True),
    "dampening": lambda m: SGD(m.parameters(), lr=RATE, momentum=0.8, dampening=0.4),
    "sgd maximize": lambda m: SGD(m.parameters(), lr=RATE, momentum=0.8, maximize=True),
    "sgd groups": lambda m: SGD([{"params": [m.w], "lr": 3 * RATE}, {"params": [m.other]}], lr=RATE, momentum=0.8),
    "adam": lambda m: Adam(m.parameters(), lr=RATE, betas=BETAS),
    "large eps": lambda m: Adam(m.parameters(), lr=RATE, betas=BETAS, eps=0.3),
    "adamw": lambda m: AdamW(m.parameters(), lr=RATE, betas=BETAS, weight_decay=2.0),
    "fused": lambda m: AdamW(m.parameters(), lr=RATE, betas=BETAS, weight_decay=2.0, fused=True),
    "tensor lr": lambda m: AdamW(m.parameters(), lr=torch.tensor(RATE), betas=BETAS, weight_decay=2.0, fused=True),
    "adam maximize": lambda m: Adam(m.parameters(), lr=RATE, betas=BETAS, maximize=True),
    "adam groups": lambda m: AdamW(
        [{"params": [m.w], "lr": 3 * RATE, "eps": 0.1}, {"params": [m.other], "weight_decay": 2.0}],
        lr=RATE,
        betas=BETAS,
    ),
}


def retrained(make: Make, norms: Callable[[int], float], steps: int, loss: Any) -> float:
    """What the probe reads after training with torch's own clipping."""
    model = Vector()
    optimizer = make(model)
    for step in range(steps):
        loss(model, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), norms(step))
        optimizer.step()
        optimizer.zero_grad()
    return read_out(model, 1.0).item()


def difference(make: Make, warm: int, loss: Any) -> float:
    """d probe / d log(threshold in the last T steps), by training twice."""

    def end(side: float) -> float:
        return retrained(make, lambda step: NORM * (1.0 + side * (step >= warm)), warm + T, loss)

    return (end(NUDGE) - end(-NUDGE)) / (2 * NUDGE)


def engine_of(make: Make, *, windows: int = 1, replicas: Any = None, norm: float = NORM, **options: Any) -> Engine:
    model = Vector()
    optimizer = make(model)
    hdet.clip_gradients(optimizer, norm=norm)
    home = replicas or (lambda m, o: hdet.micro_batches(m, o, n=1))
    return Engine(
        home(model, optimizer),
        [ClipNorm(evidence=Recursion(width=1e-3), controller=Hold(), **options)],
        window=T,
        signal=Probe(read_out, (1.0, 1.0)),
        total_steps=T * windows,
    )


def train(engine: Engine, until: int, loss: Any = noisy) -> list[hdet.history.WindowRecord]:
    records = []
    for step in range(engine.step_count, until):
        for replica in engine.replicas:
            with replica:
                loss(replica.model, step).backward()
        engine.share_gradients()
        for own in engine.optimizers:
            own.step()
            own.zero_grad()
        record = engine.step([0.0] * len(engine.replicas))
        if record is not None:
            records.append(record)
    return records


def slope(record: hdet.history.WindowRecord) -> float:
    found: float = record.estimates["clip_norm"]["slope"]
    return found


@pytest.mark.parametrize("loss", [noisy, seldom])
@pytest.mark.parametrize("warm", [0, 2 * T])
@pytest.mark.parametrize("name", list(MAKES))
def test_the_slope_is_that_of_training_again(name: str, warm: int, loss: Any) -> None:
    """From the run's first step, where bias corrections are large, and from a window's opening later on."""
    want = difference(MAKES[name], warm, loss)
    records = train(engine_of(MAKES[name], windows=1 + warm // T), warm + T, loss)
    assert abs(want) > 1e-4
    assert slope(records[-1]) == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("warm", [0, 2 * T])
def test_a_decay_in_the_gradient_is_squared_by_adam_with_it(warm: int, maximize: bool) -> None:
    """But for how this decay would have answered, which the recursion leaves out."""

    def make(model: Vector) -> Optimizer:
        return Adam(model.parameters(), lr=RATE, betas=BETAS, weight_decay=0.3, maximize=maximize)

    records = train(engine_of(make, windows=1 + warm // T), warm + T)
    assert slope(records[-1]) == pytest.approx(difference(make, warm, noisy), rel=0.04)


def test_slopes_are_in_the_knobs_own_coordinate() -> None:
    (by_log,) = train(engine_of(MAKES["momentum"]), T)
    (by_unit,) = train(engine_of(MAKES["momentum"], space=hdet.spaces.Linear(0.1), bounds=(0.1, 10.0)), T)
    assert slope(by_unit) == pytest.approx(slope(by_log) * 0.1 / NORM, rel=1e-6)


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_a_threshold_that_no_gradient_reaches_teaches_nothing(name: str) -> None:
    (record,) = train(engine_of(MAKES[name], norm=1e4), T)
    assert record.estimates["clip_norm"]["stderr"] == float("inf")


@pytest.mark.parametrize("name", ["nesterov", "adamw"])
def test_a_resume_in_mid_window_goes_on_with_the_same_derivative(name: str) -> None:
    whole = engine_of(MAKES[name], windows=2)
    want = train(whole, 2 * T)
    first = engine_of(MAKES[name], windows=2)
    train(first, T + 5)
    saved = io.BytesIO()
    torch.save(first.state_dict(), saved)
    saved.seek(0)
    again = engine_of(MAKES[name], windows=2)
    again.load_state_dict(torch.load(saved))
    assert slope(train(again, 2 * T)[-1]) == slope(want[-1])


def test_replicas_clip_too() -> None:
    """Copies of an optimizer have no hooks of its; binding the knob clips there as well."""
    twins = partial(hdet.replicate, n=2)
    engine = engine_of(MAKES["momentum"], replicas=twins, spread=hdet.spreads.TwoLevel(0.0))
    train(engine, T)
    one, other = (dict(model.named_parameters()) for model, _ in engine.hosts)
    assert torch.equal(one["w"], other["w"])
    assert read_out(engine.hosts[0][0], 1.0).item() == pytest.approx(
        retrained(MAKES["momentum"], lambda step: NORM, T, noisy), rel=1e-12
    )


@pytest.mark.parametrize("skipped", [0, 4])
@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_a_step_that_a_fused_optimizer_leaves_out_changes_no_derivative(kind: Any, skipped: int) -> None:
    """Without fusing the GradScaler leaves it out itself, and nobody hears of it."""
    momentum = {"momentum": 0.8} if kind is SGD else {"betas": BETAS}
    found = []
    for fused in (False, True):
        engine = engine_of(lambda m, fused=fused: kind(m.parameters(), lr=RATE, fused=fused, **momentum))  # type: ignore[misc]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for step in range(T):
            (replica,) = engine.replicas
            with replica:
                scaler.scale(noisy(replica.model, step)).backward()
            if step == skipped:
                replica.model.w.grad[0] = torch.inf
            engine.share_gradients()
            scaler.step(replica.optimizer)
            scaler.update()
            replica.optimizer.zero_grad()
            engine.step()
        (record,) = engine.history
        found.append(slope(record))
    assert found[1] == pytest.approx(found[0], rel=1e-3)
    assert found[0] != 0.0


def test_an_optimizer_of_another_recursion_is_refused() -> None:
    with pytest.raises(ConfigError, match="not those of RMSprop"):
        engine_of(lambda m: RMSprop(m.parameters()))


def test_a_threshold_that_is_far_too_low_is_raised_and_training_is_the_better_for_it() -> None:
    def distance(model: Any) -> Tensor:
        found: Tensor = (model.w - TARGET).square().sum()
        return found

    def trained(controller: Controller | None) -> tuple[float, float]:
        model = Vector()
        optimizer = SGD([model.w], lr=0.05)
        hdet.clip_gradients(optimizer, norm=0.01)
        engine = Engine(
            hdet.micro_batches(model, optimizer, n=1),
            [ClipNorm(controller=controller)],
            window=30,
            signal=Probe(lambda model, batch: distance(model) * batch, (0.9, 1.1)),
            total_steps=600,
        )
        train(engine, 600, lambda model, step: distance(model))
        return distance(model).item(), engine.learned["clip_norm"].value

    held, _ = trained(Hold())
    moved, threshold = trained(None)
    assert threshold > 0.1
    assert moved < 0.5 * held
