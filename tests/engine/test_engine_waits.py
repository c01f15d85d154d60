"""The engine never waits for the device between window ends.

The models here are on the "meta" device, whose tensors hold no numbers: whatever would need one (`.item()`,
`.cpu()`, `bool`, `float`) raises. What runs there cannot wait for a device.
"""

from __future__ import annotations

import cProfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reads import Reads
from torch.overrides import TorchFunctionMode

import hdet
import hdet.nn
from hdet import Engine
from hdet.controllers import Hold
from hdet.schedules import OneCycle
from hdet.spreads import TwoLevel


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.dropout = hdet.nn.Dropout(0.1)
        self.temperature = hdet.nn.Temperature()
        self.outer = torch.nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(self.dropout(self.norm(self.inner(x))))
        return out


def build(device: str, **options: Any) -> Engine:
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    probe = hdet.Probe(
        lambda m, x: m(x).square().mean(), [torch.ones(4, 4, device=device) * j for j in range(2)], at="average"
    )
    knobs = [
        hdet.LearningRate(schedule=OneCycle(0.01, total_steps=20)),
        hdet.WeightDecay(),
        hdet.Beta1(),
        hdet.Dropout(),
        hdet.AttentionTemperature(),
    ]
    return Engine(hdet.replicate(model, optimizer, n=4), knobs, window=10, signal=probe, gradients="local", **options)


def passes(engine: Engine, device: str) -> list[Any]:
    losses = []
    for replica in engine.replicas:
        with replica:
            loss = replica.model(torch.ones(4, 4, device=device)).square().mean()
            loss.backward()
        losses.append(loss.detach())
    engine.share_gradients()
    return losses


def one_step(engine: Engine, device: str) -> list[Any]:
    losses = passes(engine, device)
    for optimizer in engine.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_nothing_is_read_from_the_device_before_the_window_ends() -> None:
    engine = build("meta")
    for _ in range(9):
        engine.step(one_step(engine, "meta"))
    losses = one_step(engine, "meta")
    with pytest.raises((NotImplementedError, RuntimeError), match=r"meta tensor"):
        engine.step(losses)


def test_gradients_are_shared_without_reading_them() -> None:
    model = torch.nn.Linear(4, 1, device="meta")
    replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=3)
    engine = Engine(replicas, [hdet.LearningRate()], window=10)
    engine.step(one_step(engine, "meta"))
    for seats in (hdet.micro_batches(model, torch.optim.SGD(model.parameters(), lr=0.1), n=3),):
        engine = Engine(seats, [hdet.LearningRate(spread=TwoLevel(0))], window=10)
        engine.step(one_step(engine, "meta"))


@pytest.mark.parametrize("horizon", [0, 30])
@pytest.mark.parametrize("rate", [0.01, torch.tensor(0.01, device="meta")], ids=["float", "tensor"])
def test_contrast_reads_nothing_before_the_window_ends(rate: Any, horizon: int) -> None:
    """Rates and step counts on the device, and the probe's gradient taken anew in mid-window."""
    model = Net().to("meta")
    optimizer = torch.optim.AdamW([{"params": model.inner.parameters()}, {"params": model.outer.parameters()}])
    for group in optimizer.param_groups:
        for parameter in group["params"]:  # as fused optimizers keep it
            moments = {name: torch.ones_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.ones((), device="meta"), **moments}
    engine = Engine(
        hdet.micro_batches(model, optimizer, 4),
        [hdet.Dropout(evidence=hdet.evidence.Contrast(horizon=horizon, refresh=3), controller=Hold())],
        window=10,
        signal=hdet.Probe(lambda m, x: m(x).square().mean(), [torch.ones(4, 4, device="meta")] * 2),
        total_steps=20,
    )
    for group in optimizer.param_groups:
        group["lr"] = rate
    for _ in range(9):
        losses = passes(engine, "meta")
        optimizer.zero_grad()
        engine.step(losses)


def with_state(optimizer: torch.optim.Optimizer) -> None:
    """State as a fused or capturable optimizer keeps it, its step counts on the device; it appears in mid-window."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            names = ("momentum_buffer",) if "momentum" in group else ("exp_avg", "exp_avg_sq")
            moments = {name: torch.ones_like(parameter) for name in names}
            optimizer.state[parameter] = {"step": torch.ones((), device="meta"), **moments}


COUNTERFACTUAL = {
    "line": hdet.LearningRate(
        schedule=OneCycle(0.01, total_steps=20), evidence=hdet.evidence.Line(read_average_above=None)
    ),
    "analytic": hdet.WeightDecay(evidence=hdet.evidence.Analytic(stride=2)),
    "beta1": hdet.Beta1(evidence=hdet.evidence.Recursion()),
    "beta2": hdet.Beta2(evidence=hdet.evidence.Recursion()),
    "momentum": hdet.Momentum(evidence=hdet.evidence.Recursion()),
    "mixed": hdet.Dropout(evidence=hdet.evidence.MixedDifference()),
}


@pytest.mark.parametrize("rate", [0.01, torch.tensor(0.01, device="meta")], ids=["float", "tensor"])
@pytest.mark.parametrize("name", COUNTERFACTUAL)
def test_no_evidence_reads_anything_before_the_window_ends(name: str, rate: Any) -> None:
    model = Net().to("meta")
    if name == "momentum":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    objective = hdet.Objective(lambda m, x: m(x).square().mean(), [torch.ones(4, 4, device="meta")] * 2)
    engine = Engine(
        hdet.micro_batches(model, optimizer, 2),
        [COUNTERFACTUAL[name]],
        window=10,
        signal=hdet.Probe(lambda m, x: m(x).square().mean(), [torch.ones(4, 4, device="meta")] * 2),
        objective=objective,
        total_steps=20,
    )
    with_state(optimizer)
    if name != "line":  # whose own knob it is: it would have been read when the engine was made
        for group in optimizer.param_groups:
            group["lr"] = rate
    for _ in range(9):
        losses = passes(engine, "meta")
        optimizer.zero_grad()
        engine.step(losses)
    with pytest.raises((NotImplementedError, RuntimeError), match=r"meta tensor"):
        engine.step(losses)


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["float", "tensor"])
def test_no_step_but_a_windows_last_takes_a_number_from_a_tensor(lr: Any) -> None:
    """The tally is kept in tensors. A rate in a CPU tensor is read back, for which no device is waited."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    knobs = [hdet.LearningRate(), hdet.WeightDecay()]
    engine = Engine(hdet.replicate(model, optimizer, n=4), knobs, window=5)
    counts = []
    for _ in range(10):
        losses = one_step(engine, "cpu")
        rates = [own.param_groups[0]["lr"] for own in engine.optimizers] if isinstance(lr, torch.Tensor) else []
        with Reads(besides=rates) as reads:
            engine.step(losses)
        counts.append(len(reads.seen))
    assert counts[:4] == counts[5:9] == [0] * 4
    with Reads() as reads:
        losses[0].item()
    assert reads.seen


@pytest.mark.filterwarnings("ignore:the first training loss")
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["default", "fused"])
def test_attached_the_recipe_takes_no_number_before_a_windows_last_step(options: Any) -> None:
    """Step counts on the host, as torch keeps them there, and a model's only loss there: nothing else is read."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    probe = hdet.Probe(lambda m, x: m(x).square().mean(), [torch.ones(4, 4), torch.zeros(4, 4)])
    search = hdet.attach(model, optimizer, probe=probe, total_steps=60, window=6, quiet=True)
    counts = []
    for _ in range(18):
        model.train()
        loss = search.loss(model(torch.ones(4, 4)).square().mean())
        loss.backward()
        noted = search._riding.losses._losses.values()  # copies: the loop may go on with a loss in place
        own = [*noted, *(state["step"] for state in optimizer.state.values())]
        with Reads(besides=own) as reads:
            optimizer.step()
        counts.append(len(reads.seen))
        optimizer.zero_grad()
    assert len(search.history) == 3
    assert [count for step, count in enumerate(counts) if step % 6 != 5][1:] == [0] * 14


class Calls(TorchFunctionMode):
    """Counts the torch functions called."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_the_work_between_window_ends_does_not_grow_with_the_model() -> None:
    """A handful of small operators a step: the tally, and no pass over the parameters."""
    counts = []
    for depth in (1, 20):
        model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(depth)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        engine = Engine(hdet.replicate(model, optimizer, n=2), [hdet.LearningRate()], window=5)
        losses = one_step(engine, "cpu")
        with Calls() as calls:
            engine.step(losses)
        counts.append(calls.count)
    assert counts[0] == counts[1] < 30


def functions_called(matrices: int, scheduled: bool) -> float:
    """In a step of fused AdamW that `hdet.attach` rides on, with a rate for each matrix."""
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4, bias=False) for _ in range(matrices)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 400) if scheduled else None
    probe = hdet.Probe(lambda m, x: m(x).square().mean(), [torch.ones(4, 4), torch.zeros(4, 4)])
    options: dict[str, Any] = {"total_steps": 400, "window": 200, "micro_batches": 1, "quiet": True}
    hdet.attach(model, optimizer, probe=probe, rates="matrices", scheduler=scheduler, **options)
    profile = cProfile.Profile()
    for step in range(96):
        if step == 64:  # from here on 64 steps are planned at once
            profile.enable()
        model(torch.ones(4, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    profile.disable()
    return sum(entry.callcount for entry in profile.getstats()) / 32


@pytest.mark.filterwarnings("ignore:the first training loss", "ignore:hdet was told no training loss")
def test_a_matrix_of_its_own_adds_few_calls_to_a_step_under_a_torch_scheduler_too() -> None:
    own, told = ((functions_called(24, kind) - functions_called(8, kind)) / 16 for kind in (False, True))
    assert own < 110
    assert told < own + 40


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_driver_sees_no_wait() -> None:
    engine = build("cuda")
    for step in range(20):
        losses = one_step(engine, "cuda")
        if step % 10 == 9:
            engine.step(losses)
            continue
        torch.cuda.set_sync_debug_mode("error")
        try:
            engine.step(losses)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kept", ["device", "host"])
@pytest.mark.parametrize("options", [{"fused": True}, {"capturable": True}], ids=["fused", "capturable"])
def test_on_a_gpu_no_evidence_waits_with_rates_and_step_counts_there(options: Any, kept: Any) -> None:
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01, device="cuda"), **options)
    engine = Engine(
        hdet.micro_batches(model, optimizer, 4),
        [
            hdet.LearningRate(evidence=hdet.evidence.Line()),
            hdet.WeightDecay(evidence=hdet.evidence.Analytic()),
            hdet.Dropout(evidence=hdet.evidence.Contrast(horizon=30)),
        ],
        window=10,
        signal=hdet.Probe(lambda m, x: m(x).square().mean(), [torch.ones(4, 4, device="cuda") * j for j in range(2)]),
        anchor=kept,
        averages=kept,
    )
    for step in range(30):
        losses = one_step(engine, "cuda")
        torch.cuda.set_sync_debug_mode("default" if step % 10 == 9 else "error")
        try:
            engine.step(losses)
        finally:
            torch.cuda.set_sync_debug_mode("default")
